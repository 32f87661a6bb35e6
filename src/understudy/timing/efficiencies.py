"""What of a data sheet a GPU reaches, and what a step costs besides: the numbers that presets hold and fits find."""

from __future__ import annotations

import math

import msgspec

from understudy.errors import ConfigError


class Efficiencies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of a GPU's peaks, and overheads. A fitted share may pass 1 where it absorbs what is not modelled."""

    weights: float
    """Of the memory bandwidth, reading the weights of linear layers and head."""
    compute: float
    """Of the peak of the weights' type, in linear layers and head."""
    kv: float
    """Of the memory bandwidth, reading the KV cache in decodes."""
    attention: float = 0.65
    """Of the bf16 peak, in the attention of prefill."""
    experts: float = 0.8
    """Of the memory bandwidth, reading experts."""
    expert_compute: float = 0.15
    """Of the peak of the experts' type."""
    routing_ns: float = 0.0
    """Of a token in a layer of experts, whatever the number of GPUs: choosing experts, reordering tokens."""
    link: float = 0.6
    """Of the link between GPUs."""
    link_latency_us: float = 14.0
    """Of one all-reduce between two GPUs."""
    step_ms: float = 0.95
    layer_us: float = 6.5
    sequence_us: float = 11.0
    prefill_ms: float = 1.1
    """More, in a step with prefill."""
    floor_ms_per_layer: float = 0.0
    """The least that a step outside CUDA graphs takes to launch."""
    mixed_kv_factor: float = 1.0
    """What reading the KV cache takes in a step with prefill, against one without."""
    front_end_ms: float = 6.6
    """Between client and engine, over HTTP: in TTFT, not between tokens."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in SHARES):
                least = "above 0" if name in SHARES else "not negative"
                raise ConfigError(f"timing.{name} must be finite and {least}, got {value}")


PEAKS = ("weights", "compute", "kv", "attention", "experts", "expert_compute", "link")
"""Those that are shares of what a data sheet says: nothing that is modelled as it is passes 1."""
SHARES = (*PEAKS, "mixed_kv_factor")
"""Those that something is divided by, or multiplied with."""
