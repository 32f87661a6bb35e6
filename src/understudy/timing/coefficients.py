"""What a rank reads and computes in a step, in milliseconds: all that the core's physical model knows of a GPU."""

from __future__ import annotations

import math

import msgspec

from understudy._core import StepTiming, physical_timing
from understudy.errors import ConfigError

CAPTURES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes for which vLLM captures a CUDA graph unless told otherwise; a step is padded to the next."""


class StepCoefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of one rank, reduced from a model, a GPU and how the one is spread over several of the other.

    A step is the sum of linear layers, experts, head, KV, prefill attention, communication and overheads; where weights
    are read and computed with, the two overlap: (a^p + b^p)^(1/p) with p = `softness`.
    """

    weights_ms: float = 0.0
    """Linear weights, read once."""
    token_ms: float = 0.0
    """Computing a token with them, of those that the step is padded to."""
    expert_ms: float = 0.0
    """Weights of one expert in all layers, read once."""
    local_experts: float = 0.0
    """Experts of a layer that are on the rank."""
    expert_share: float = 0.0
    """Of a layer's experts, the part that a token is sent to: k / E."""
    expert_token_ms: float = 0.0
    """Computing a token of all data-parallel ranks with them, this rank's part of it."""
    head_ms: float = 0.0
    """The output matrix, read once."""
    head_sequence_ms: float = 0.0
    """Computing the logits of a sequence."""
    context_ms: float = 0.0
    """Reading the KV of a token of context, in layers that see all of it."""
    window_context_ms: float = 0.0
    """The same in layers with a sliding window."""
    window: int = 0
    """Its size in tokens; 0 where no layer has one."""
    mix: float = 1.0
    """Factor on reading KV when there is prefill in the step."""
    attention_ms: float = 0.0
    """Of a new prompt token with one token before it, in layers that see all of them."""
    window_attention_ms: float = 0.0
    """The same in layers with a sliding window."""
    comm_ms: float = 0.0
    """Between tensor-parallel ranks, each step."""
    comm_token_ms: float = 0.0
    """And each token that the step is padded to."""
    comm_rank_token_ms: float = 0.0
    """Between data-parallel ranks, each token of all of them."""
    ranks: int = 1
    """How many there are; where a step does not say what all of them compute, each is taken to be as busy."""
    step_ms: float = 0.0
    """Overhead of a step."""
    sequence_ms: float = 0.0
    """Of a sequence in it."""
    prefill_ms: float = 0.0
    """Of prefill being in it."""
    floor_ms: float = 0.0
    """A step with prefill that is too large for a graph takes no less: its kernels are launched one by one."""
    floor_above_tokens: int | None = None
    """How many tokens fit a graph; None: as many as the largest capture."""
    captures: tuple[int, ...] = CAPTURES
    """Sizes of graphs, rising."""
    softness: float = 2.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int | float) and (not math.isfinite(value) or value < 0):
                raise ConfigError(f"timing.{field} must be finite and not negative, got {value}")

    def build(
        self, speedup_ratio: float = 1.0, decode_speedup_ratio: float = 1.0, **domain: int | None
    ) -> StepTiming:
        """The native model of these numbers; `domain` as in `_core.physical_timing`."""
        whole = ("captures", "window", "floor_above_tokens", "ranks")
        above = self.floor_above_tokens
        return physical_timing(
            {field: getattr(self, field) for field in self.__struct_fields__ if field not in whole},
            captures=self.captures,
            window=self.window,
            ranks=self.ranks,
            floor_above_tokens=max(self.captures, default=0) if above is None else above,
            speedup_ratio=speedup_ratio,
            decode_speedup_ratio=decode_speedup_ratio,
            **domain,
        )
