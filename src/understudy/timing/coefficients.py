"""`StepCoefficients`: the parameters of the core's physical timing model, in milliseconds."""

from __future__ import annotations

import math

import msgspec

from understudy._core import StepTiming, physical_timing
from understudy.errors import ConfigError

CAPTURES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes for which vLLM captures a CUDA graph by default; a step is padded to the next size."""


def captures_up_to(largest: int) -> tuple[int, ...]:
    """Return the batch sizes for which vLLM captures CUDA graphs if the largest is given."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return tuple(size for size in sizes if size <= largest)


class StepCoefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step times of one rank, computed from a model, a GPU and the parallelism.

    A step is the sum of linear layers, experts, head, KV, prefill attention, communication and overheads. Reading
    weights and computing with them overlap: (a^p + b^p)^(1/p) with p = `softness`.
    """

    weights_ms: float = 0.0
    """Reading the linear weights, per step."""
    token_ms: float = 0.0
    """Computing with the linear weights, per padded token."""
    expert_ms: float = 0.0
    """Reading one expert's weights in all layers."""
    local_experts: float = 0.0
    """Experts per layer on this rank."""
    expert_share: float = 0.0
    """Share of a layer's experts that a token uses: k / E."""
    expert_spread: float = 0.0
    """Standard deviations by which the busiest of several expert-parallel groups exceeds the mean."""
    draft_novelty: float = 1.0
    """Share of a draft's experts that the step would not read without it."""
    expert_token_ms: float = 0.0
    """This rank's expert computation, per token of all data-parallel ranks."""
    head_ms: float = 0.0
    """Reading the output matrix, per step."""
    head_sequence_ms: float = 0.0
    """Computing the logits, per sequence."""
    context_ms: float = 0.0
    """Reading KV in full-attention layers, per token of context."""
    window_context_ms: float = 0.0
    """Reading KV in sliding-window layers, per token of context."""
    window: int = 0
    """Window of sliding-window layers in tokens; 0 without such layers."""
    mix: float = 1.0
    """Factor on reading KV in a step with prefill."""
    attention_ms: float = 0.0
    """Prefill attention in full-attention layers, per pair of a new token and an earlier one."""
    window_attention_ms: float = 0.0
    """Prefill attention in sliding-window layers, per pair."""
    draft_attention_ms: float = 0.0
    """Attention of a draft, per pair with a token of its past; 0: as prefill attention."""
    history_ms: float = 0.0
    """Making keys and values of a latent that a prompt chunk finds in the cache, per token."""
    comm_ms: float = 0.0
    """Communication between tensor-parallel ranks, per step."""
    comm_token_ms: float = 0.0
    """Communication between tensor-parallel ranks, per padded token."""
    comm_rank_token_ms: float = 0.0
    """Communication between data-parallel ranks, per token of all ranks."""
    ranks: int = 1
    """Number of data-parallel ranks; if a step does not give the load of all, they are assumed equally busy."""
    step_ms: float = 0.0
    """Overhead per step."""
    sequence_ms: float = 0.0
    """Overhead per sequence in a step."""
    prefill_ms: float = 0.0
    """Overhead of a step with prefill."""
    floor_ms: float = 0.0
    """Least time of a step with prefill that is too large for a graph, whose kernels are launched one by one."""
    floor_above_tokens: int | None = None
    """Largest step in tokens that fits a graph; None: the largest capture."""
    captures: tuple[int, ...] = CAPTURES
    """Batch sizes of CUDA graphs, ascending."""
    softness: float = 2.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int | float) and (not math.isfinite(value) or value < 0):
                raise ConfigError(f"timing.{field} must be a finite number from 0, got {value}")

    def build(self, **domain: int | None) -> StepTiming:
        """Build the native timing model; `domain` as in `_core.physical_timing`."""
        whole = ("captures", "window", "floor_above_tokens", "ranks")
        above = self.floor_above_tokens
        return physical_timing(
            {field: getattr(self, field) for field in self.__struct_fields__ if field not in whole},
            captures=self.captures,
            window=self.window,
            ranks=self.ranks,
            floor_above_tokens=max(self.captures, default=0) if above is None else above,
            **domain,
        )
