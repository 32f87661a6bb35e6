"""Timing models: how long a step takes. Plain immutable data that a configuration names by `kind`."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from understudy._core import StepTiming, constant_timing, interpolated_timing, polynomial_timing
from understudy.errors import ConfigError


class TimingModel(Protocol):
    """A timing model written in Python, asked once for each part of a step. Milliseconds, not negative, finite."""

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:
        """`requests` compute prompt tokens; on average `mean_input` are done afterwards, `mean_cached` before."""

    def decode_ms(
        self, requests: int, context_tokens: int, mean_context: int, capacity_tokens: int, /
    ) -> float:
        """`requests` sample a token each over `context_tokens` together; the cache holds `capacity_tokens`."""


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


class Interpolated(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="interpolated"
):
    """Measured times from an NPZ file, interpolated linearly, and extrapolated past its grid.

    The arrays are those of Dynamo's planner profile: `prefill_isl`, `prefill_ttft_ms`, `decode_active_kv_tokens`,
    `decode_context_length` and `decode_itl` (ms, one row for each active_kv). A file that does not load is an error.
    """

    path: str

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model. ConfigError names the file, and the array at fault."""
        import numpy as np

        names = (
            "prefill_isl",
            "prefill_ttft_ms",
            "decode_active_kv_tokens",
            "decode_context_length",
            "decode_itl",
        )
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = {name: np.asarray(file[name], dtype=np.float64) for name in names}
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error
        shape = (len(arrays["decode_active_kv_tokens"]), len(arrays["decode_context_length"]))
        if arrays["decode_itl"].shape != shape:
            raise ConfigError(
                f"timing.path {self.path}: decode_itl must have shape {shape}, has {arrays['decode_itl'].shape}"
            )
        try:
            return interpolated_timing(
                arrays["prefill_isl"].tolist(),
                arrays["prefill_ttft_ms"].tolist(),
                arrays["decode_active_kv_tokens"].tolist(),
                arrays["decode_context_length"].tolist(),
                arrays["decode_itl"].ravel().tolist(),
                speedup_ratio,
                decode_speedup_ratio,
            )
        except ConfigError as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error


Timing = Polynomial | Constant | Interpolated
