"""The space of a plan: the shapes of engines that a model, its GPUs and the log suggest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from understudy.engines.kinds.registry import find_kind
from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES
from understudy.planning.shape import Shape, Size
from understudy.timing.accuracy import find_accuracy
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.presets import target_of
from understudy.timing.weight_types import weight_type
from understudy.workload.reuse import hit_curve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.planning.question import Question
    from understudy.workload import Workload

CHUNKS = (2048, 4096)
"""Steps smaller than the engine's default, which lengthen prompts and shorten the steps of others."""
LEAST_REUSE = 0.01
"""Share of prompt tokens that must repeat before caches are worth a router."""
LEAST_TIER_GAIN = 0.02
"""Share of prompt tokens that an unlimited cache must hit in addition before host memory is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """Prompt tokens of a log that repeat."""

    share: float
    """Hit by one unlimited cache."""

    @classmethod
    def of(cls, workload: Workload) -> Reuse:
        """Measure the reuse of a log."""
        return cls(share=hit_curve(workload, workload.trace_block_size).unlimited_hit_ratio)

    @property
    def routing(self) -> str:
        """Routing of several engines: by cached prefixes if prompts share them, else by load."""
        return "kv" if self.share >= LEAST_REUSE else "least_loaded"


def list_base_shapes(question: Question, reuse: Reuse) -> tuple[list[Shape], list[str]]:
    """Return the shapes with the engine's own defaults, and notes on engines that are left out."""
    model = find_architecture(question.model)
    shapes: list[Shape] = []
    notes: list[str] = []
    sizes = [
        1 << power for power in range(question.node_gpus.bit_length()) if 1 << power <= question.node_gpus
    ]
    for name in question.gpus:
        left_out = [
            engine for engine in KIND_MODULES if engine != "vllm" and not is_measured(question, name, engine)
        ]
        if left_out:
            titles = " and ".join(find_kind(engine).title for engine in left_out)
            notes.append(
                f"not tried on {name}: {titles}, whose step times were not measured with this model there"
            )
        for engine in KIND_MODULES:
            if engine in left_out:
                continue
            shapes += [Shape(gpu=name, tensor=size, engine=engine, routing=reuse.routing) for size in sizes]
        if model.num_experts:
            shapes += [
                Shape(gpu=name, tensor=1, ranks=size, routing=reuse.routing) for size in sizes if size > 1
            ]
    return [shape for shape in shapes if shape.engine_gpus <= question.most_gpus], notes


def is_measured(question: Question, gpu: str, engine: str) -> bool:
    """Whether the step times of an engine were measured with this model and its weights on this GPU."""
    model = find_architecture(question.model)
    target = target_of(model, find_gpu(gpu), weight_type(model.weights).name, engine)
    return find_accuracy(target).own is not None


def list_variants(question: Question, shape: Shape, *, tier_gain: float) -> Iterator[Shape]:
    """Yield the variants of a shape: smaller steps, host memory, and prefill and decode workers."""
    if shape.engine != "vllm" or shape.is_split:
        return
    default = shape.build(question, Size(engines=1)).settings.engine
    for chunk in CHUNKS:
        if default.max_num_batched_tokens is None or chunk < default.max_num_batched_tokens:
            yield replace(shape, chunk_tokens=chunk)
    if question.host_gib is not None and tier_gain >= LEAST_TIER_GAIN and shape.ranks == 1:
        yield replace(shape, host_gib=question.host_gib * shape.engine_gpus)
    if question.splits and shape.ranks == 1:
        yield replace(shape, is_split=True, routing="round_robin")


def list_sizes_of(shape: Shape, engines: int) -> list[Size]:
    """Return the fleets of so many engines: one, or all divisions into prefill and decode workers."""
    if not shape.is_split:
        return [Size(engines=engines)]
    return [Size(prefill=prefill, engines=engines - prefill) for prefill in range(1, engines)]


def check_shape(question: Question, shape: Shape) -> str | None:
    """Return why no fleet of this shape can be built; None if one can."""
    size = Size(engines=1, prefill=1) if shape.is_split else Size(engines=1)
    try:
        shape.build(question, size)
    except ConfigError as error:
        return str(error)
    return None
