"""Timing models: how long a step takes. Plain immutable data that a configuration names by `kind`."""

from __future__ import annotations

import math

import msgspec

from understudy._core import StepTiming, constant_timing, polynomial_timing
from understudy.errors import ConfigError


class Polynomial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="polynomial"):
    """Prefill quadratic in new tokens, decode quadratic in KV utilisation: the default of Dynamo's mocker."""

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model."""
        return polynomial_timing(speedup_ratio, decode_speedup_ratio)


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """The same time for every prefill, and for every decode."""

    prefill_ms: float
    decode_ms: float

    def __post_init__(self) -> None:
        for field in ("prefill_ms", "decode_ms"):
            value = getattr(self, field)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"timing.{field} must be finite and not negative, got {value}")

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model."""
        return constant_timing(self.prefill_ms, self.decode_ms, speedup_ratio, decode_speedup_ratio)


Timing = Polynomial | Constant
