"""`Efficiencies`: shares of a GPU's peaks, and step overheads; presets contain them and fits determine them."""

from __future__ import annotations

import math

import msgspec

from understudy.errors import ConfigError


class Efficiencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of a GPU's peaks, and overheads. A fitted share may exceed 1 if it absorbs unmodelled effects."""

    weights: float
    """Share of the memory bandwidth when reading the weights of linear layers and head."""
    compute: float
    """Share of the peak of the weights' type in linear layers and head."""
    kv: float
    """Share of the memory bandwidth when decodes read the KV cache."""
    attention: float = 0.65
    """Share of the bf16 peak in prefill attention."""
    experts: float = 0.8
    """Share of the memory bandwidth when reading experts."""
    expert_compute: float = 0.15
    """Share of the peak of the experts' type."""
    routing_ns: float = 0.0
    """Time per token and expert layer to choose experts and reorder tokens, independent of the number of GPUs."""
    link: float = 0.6
    """Share of the bandwidth of the link between GPUs."""
    link_latency_us: float = 14.0
    """Latency of one all-reduce between two GPUs."""
    step_ms: float = 0.95
    layer_us: float = 6.5
    sequence_us: float = 11.0
    prefill_ms: float = 1.1
    """Extra overhead of a step with prefill."""
    floor_ms_per_layer: float = 0.0
    """Least time per layer to launch a step outside CUDA graphs."""
    mixed_kv_factor: float = 1.0
    """Factor on reading the KV cache in a step with prefill."""
    expert_imbalance: float = 0.0
    """Spread of tokens among expert-parallel groups, as a share of that of random routing; 0: all are equally busy."""
    softness: float = 2.0
    """Exponent of the sum of reading and computing, which overlap; the larger, the nearer to the longer of both."""
    front_end_ms: float = 6.6
    """Time between client and engine over HTTP; part of TTFT, not of ITL."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in SHARES):
                least = "above" if name in SHARES else "from"
                raise ConfigError(f"timing.{name} must be a finite number {least} 0, got {value}")
        if self.softness < 1:
            raise ConfigError(f"timing.softness must be at least 1, got {self.softness}")


PEAKS = ("weights", "compute", "kv", "attention", "experts", "expert_compute", "link")
"""Fields that are shares of data-sheet peaks; in an accurate model none exceeds 1."""
SHARES = (*PEAKS, "mixed_kv_factor")
"""Fields that are factors or divisors, so they must be above 0."""
