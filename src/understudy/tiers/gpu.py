"""The GPUs of a worker: how many KV blocks fit on them, and how long steps take there."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from understudy.errors import ConfigError
from understudy.tiers.model_shape import ModelShape
from understudy.tiers.sizes import parse_bytes
from understudy.timing.architecture import Architecture
from understudy.timing.capacity import BLOCKS_PLUS_MINUS, kv_blocks
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.fitted_for import check_fitted_for, facts_of
from understudy.timing.gpus import Gpu, find_gpu, sheet_gpu
from understudy.timing.physical import Origin, Physical
from understudy.timing.presets import preset
from understudy.timing.sources import Aiconfigurator, MeasuredKernels


class Blocks(NamedTuple):
    """KV blocks of a worker, and how far they may be off."""

    blocks: int
    plus_minus: int


class GpuSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs of a worker: by name, by their data sheet, or only what they hold. Sizes in bytes or as text ("80GiB")."""

    name: str | None = None
    """H100, H200, B200, A100, L40S, RTX 4090, RTX PRO 6000."""
    memory: int | str | None = None
    weights: int | str | None = None
    """Of the whole model; each GPU holds its share."""
    bandwidth_gbps: float | None = None
    """Of its memory, 10^9 bytes a second; with `tflops`, a GPU that is not known by name."""
    tflops: float | None = None
    """Of dense bf16 products."""
    link_gbps: float | None = None
    """One direction of the link to the worker's other GPUs; as `memory`, in place of what a GPU known by name has."""
    weight_dtype: str | None = None
    """bf16, fp8, int4, mxfp4 or nvfp4; the model's own unless told otherwise."""
    gpu_memory_utilization: float = 0.9
    overhead: int | str | None = None
    """Of each GPU: activations, graphs."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Ranks that share the experts of a model; each rank is a worker."""
    expert_parallel_size: int | None = None
    """Groups that experts are dealt out to; 1 unless told otherwise."""
    enable_expert_parallel: bool = False
    """Deal them out to every GPU of every rank."""
    front_end_ms: float | None = None
    """Between client and engine; that of the preset unless told otherwise, 0 for times in the engine."""
    op_tables: str | None = None
    """A folder of measured kernels, which times come from instead of a preset."""
    extrapolate: bool = False
    """Go on past the ends of op tables."""
    aiconfigurator: bool = False
    """Times come from that package's database instead of a preset."""

    def __post_init__(self) -> None:
        sheet = (self.bandwidth_gbps, self.tflops)
        if self.name is not None and any(value is not None for value in sheet):
            raise ConfigError(
                "gpu.name and a data sheet (gpu.bandwidth_gbps, gpu.tflops) both say what GPU it is; give one"
            )
        if (self.bandwidth_gbps is None) != (self.tflops is None):
            raise ConfigError("gpu.bandwidth_gbps and gpu.tflops belong together: give both")
        if self.bandwidth_gbps is not None and self.memory is None:
            raise ConfigError(
                "gpu.bandwidth_gbps needs gpu.memory (--gpu-memory): it is on the data sheet too"
            )
        if not self.is_known:
            if self.memory is None or self.weights is None:
                raise ConfigError("gpu needs a name, its data sheet, or memory and weights")
            if idle := [name for name in _OF_STEPS if getattr(self, name) != _DEFAULTS[name]]:
                raise ConfigError(
                    f"{idle[0]} says how long steps take, and from memory and weights alone only blocks follow; give "
                    "gpu.name (--gpu) or a data sheet with it, or leave it out"
                )
        if self.extrapolate and self.op_tables is None:
            raise ConfigError("--extrapolate is for op tables: give their folder as --timing")
        if self.op_tables is not None and self.aiconfigurator:
            raise ConfigError("gpu.op_tables and gpu.aiconfigurator both say where times come from; give one")
        if self.aiconfigurator and self.link_gbps is not None:
            raise ConfigError(
                "gpu.link_gbps means nothing to aiconfigurator, which has links of its own; leave it out"
            )
        if self.enable_expert_parallel and self.expert_parallel_size not in (None, self.num_gpus):
            raise ConfigError(
                f"enable_expert_parallel deals experts out to {self.num_gpus} GPUs, and "
                f"expert_parallel_size={self.expert_parallel_size} to others; give one"
            )

    @property
    def is_known(self) -> bool:
        """Whether the time of a step follows from it."""
        return self.name is not None or self.bandwidth_gbps is not None

    @property
    def num_gpus(self) -> int:
        """Of all ranks."""
        return self.tensor_parallel_size * self.data_parallel_size

    def timing(self, model: str | None, kv_dtype: str | None) -> Physical | MeasuredKernels | Aiconfigurator:
        """Step times of this model on these GPUs. Raises ConfigError, naming the field."""
        deployed = self.deployment(model, kv_dtype)
        found = preset(deployed.model, deployed.gpu, deployed.weights, deployed.kv)
        outside = found.efficiencies.front_end_ms if self.front_end_ms is None else self.front_end_ms
        if self.op_tables is not None:
            return MeasuredKernels(
                folder=self.op_tables,
                deployment=deployed,
                efficiencies=found.efficiencies,
                extrapolate=self.extrapolate,
                front_end_ms=outside,
            )
        if self.aiconfigurator:
            return Aiconfigurator(deployment=deployed, front_end_ms=outside)
        gpus = deployed.parallel.tensor * deployed.parallel.data
        linked = "" if self.name is None or self.link_gbps is None else f" (links of {self.link_gbps:g} GB/s)"
        detail = (
            f"{deployed.model.name} in {deployed.weights} (KV {deployed.kv}) on {f'{gpus} x ' if gpus > 1 else ''}"
            f"{deployed.gpu.name}{linked}, {found.trust}: {found.origin}"
        )
        return Physical(
            coefficients=deployed.coefficients(found.efficiencies),
            origin=Origin(source="preset" if self.name is not None else "data sheet", detail=detail),
            front_end_ms=outside,
        )

    def check_timing(self, timing: object, model: str | None, kv_dtype: str | None) -> None:
        """Refuse times that were fitted to another deployment. Raises ConfigError, naming what differs."""
        asked = {"model": model, "kv_dtype": kv_dtype, "tensor_parallel_size": self.tensor_parallel_size}
        check_fitted_for(timing, facts_of(self.deployment(model, kv_dtype)) if self.is_known else asked)

    def refuse_idle(self, timing: object, *, has_blocks: bool, has_timing: bool) -> None:
        """Refuse what changes nothing beside an engine that was told its blocks, or `timing`. ConfigError names it."""
        if has_blocks:
            for name in ("memory", "weights", "overhead", "gpu_memory_utilization"):
                on_the_sheet = name == "memory" and self.name is None
                if getattr(self, name) != _DEFAULTS[name] and not on_the_sheet:
                    raise ConfigError(
                        f"{name if name.startswith('gpu') else f'gpu.{name}'} says how many blocks a worker has, and "
                        "num_gpu_blocks (--num-gpu-blocks) does too; give one"
                    )
        if has_timing:
            for name, field in (("front_end_ms", self.front_end_ms), ("gpu.link_gbps", self.link_gbps)):
                if field is not None and (self.name is not None or name == "front_end_ms"):
                    raise ConfigError(
                        f"{name} belongs to times that follow from the GPU, and engine.timing (--timing) gives others; "
                        "leave it out"
                    )
        fitted = getattr(timing, "fitted_for", None) is not None  # then it is compared
        if has_blocks and has_timing and not fitted and self.data_parallel_size == 1:
            raise ConfigError(
                "gpu changes nothing beside engine.timing (--timing), which says how long steps take, and "
                "num_gpu_blocks (--num-gpu-blocks), which says how many blocks there are; leave it out, or one of them"
            )

    def steps_together(self, model: str | None, kv_dtype: str | None) -> bool:
        """Whether data-parallel ranks wait for each other in every step: those that share experts do."""
        return self.is_known and self.deployment(model, kv_dtype).steps_together

    def num_blocks(
        self,
        model: str | None,
        kv_dtype: str | None,
        block_size: int,
        *,
        step_tokens: int | None = None,
        sequences: int | None = None,
    ) -> Blocks:
        """Blocks of a worker with this model, and how far they may be off. Raises ConfigError, naming the field."""
        if model is None:
            raise ConfigError(
                "gpu needs model, to know what a token weighs: a name or the path of a config.json"
            )
        if not self.is_known:
            assert self.memory is not None
            assert self.weights is not None
            blocks = ModelShape.find(model).num_gpu_blocks(
                block_size=block_size,
                gpu_memory=self.memory,
                weights=self.weights,
                gpu_memory_utilization=self.gpu_memory_utilization,
                overhead=self.overhead,
                kv_dtype=kv_dtype,
                tensor_parallel=self.tensor_parallel_size,
            )
            return Blocks(blocks, 0)
        deployed = self.deployment(model, kv_dtype)
        blocks = kv_blocks(
            deployed,
            block_size=block_size,
            max_num_batched_tokens=step_tokens or 8192,
            max_num_seqs=sequences or 256,
            gpu_memory_utilization=self.gpu_memory_utilization,
            memory_bytes=None if self.memory is None else parse_bytes("gpu.memory", self.memory),
            weight_bytes=None if self.weights is None else parse_bytes("gpu.weights", self.weights),
            overhead_bytes=None if self.overhead is None else parse_bytes("gpu.overhead", self.overhead),
        )
        return Blocks(blocks, round(blocks * BLOCKS_PLUS_MINUS))

    def deployment(self, model: str | None, kv_dtype: str | None) -> Deployment:
        """The model on these GPUs. Raises ConfigError, naming the field."""
        if model is None:
            raise ConfigError(
                "gpu needs model, to know what a step computes: a name or the path of a config.json"
            )
        shape = Architecture.find(model)
        return Deployment(
            model=shape,
            gpu=self._gpu(),
            weights=shape.weights if self.weight_dtype in (None, "auto") else str(self.weight_dtype),
            kv="bf16" if kv_dtype in (None, "auto") else str(kv_dtype),
            parallel=Parallelism(
                tensor=self.tensor_parallel_size,
                data=self.data_parallel_size,
                expert=self.num_gpus if self.enable_expert_parallel else self.expert_parallel_size or 1,
            ),
        )

    def _gpu(self) -> Gpu:
        if self.name is not None:
            found, said = find_gpu(self.name), {}
            if self.link_gbps is not None:
                said["link_gbps"] = self.link_gbps
            if self.memory is not None:
                said["memory_gb"] = parse_bytes("gpu.memory", self.memory) / 1e9
            return msgspec.structs.replace(found, **said) if said else found
        assert self.bandwidth_gbps is not None
        assert self.tflops is not None
        assert self.memory is not None
        return sheet_gpu(
            bandwidth_gbps=self.bandwidth_gbps,
            tflops=self.tflops,
            memory_gb=parse_bytes("gpu.memory", self.memory) / 1e9,
            link_gbps=self.link_gbps,
        )


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(GpuSettings)}
_OF_STEPS = (
    *("link_gbps", "weight_dtype", "data_parallel_size", "expert_parallel_size", "enable_expert_parallel"),
    *("front_end_ms", "op_tables", "aiconfigurator"),
)
"""Settings that blocks do not depend on."""
