"""Timing models, which predict the duration of a step; immutable data that a configuration selects by `kind`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from understudy._core import StepLoad, StepTiming, constant_timing, interpolated_timing, polynomial_timing
from understudy.errors import ConfigError
from understudy.timing.physical import Physical
from understudy.timing.sources import Aiconfigurator, MeasuredKernels, RecordedSteps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ARRAYS = (
    "prefill_isl",
    "prefill_ttft_ms",
    "decode_active_kv_tokens",
    "decode_context_length",
    "decode_itl",
)


class StepTimingModel(Protocol):
    """A timing model written in Python, called once per step. Times are in ms, finite and not negative."""

    def step_ms(self, step: StepLoad, /) -> float:
        """Return the duration of the whole step in ms."""


class SplitTimingModel(Protocol):
    """A model that times prefill and decode separately, as Dynamo's mocker does; the sum is the step's time."""

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:
        """Return ms for `requests` prefills; on average `mean_cached` tokens are done before and `mean_input` after."""

    def decode_ms(
        self, requests: int, context_tokens: int, mean_context: int, capacity_tokens: int, /
    ) -> float:
        """Return ms for `requests` decodes with `context_tokens` in total; the cache has `capacity_tokens`."""


class Polynomial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="polynomial"):
    """Prefill quadratic in new tokens, decode quadratic in KV utilization: the default of Dynamo's mocker."""

    front_end_ms: ClassVar[float] = 0.0

    def describe_origin(self) -> str:
        """Describe the source of its times."""
        return "a generic polynomial (Dynamo mocker), NOT a real GPU (add --model and --gpu for real times)"

    def build(self) -> StepTiming:
        """Build the native model."""
        return polynomial_timing()


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """A constant time for every prefill and for every decode."""

    prefill_ms: float
    decode_ms: float
    front_end_ms: ClassVar[float] = 0.0

    def describe_origin(self) -> str:
        """Describe the source of its times."""
        return f"given constants: {self.prefill_ms:g} ms of prefill, {self.decode_ms:g} ms of decode"

    def __post_init__(self) -> None:
        for field in ("prefill_ms", "decode_ms"):
            value = getattr(self, field)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"timing.{field} must be finite and not negative, got {value}")

    def build(self) -> StepTiming:
        """Build the native model."""
        return constant_timing(self.prefill_ms, self.decode_ms)


class Interpolated(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="interpolated"
):
    """Measured times from an NPZ file, interpolated linearly, and extrapolated beyond its grid.

    The arrays are those of Dynamo's planner profile: `prefill_isl`, `prefill_ttft_ms`, `decode_active_kv_tokens`,
    `decode_context_length` and `decode_itl` (ms, one row for each active_kv). A file that does not load is an error.
    """

    path: str
    front_end_ms: ClassVar[float] = 0.0

    def describe_origin(self) -> str:
        """Describe the source of its times."""
        return f"a planner's profile, {self.path}, extrapolated beyond its grid"

    def build(self) -> StepTiming:
        """Build the native model. ConfigError names the file and the wrong array."""
        arrays = self._load()
        for name, array in arrays.items():
            if name != "decode_itl" and array.ndim != 1:
                raise ConfigError(
                    f"timing.path {self.path}: {name} must have one dimension, has {array.ndim}"
                )
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
            )
        except ConfigError as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error

    def _load(self) -> dict[str, npt.NDArray[np.float64]]:
        import zipfile

        import numpy as np

        try:
            # Opened here because numpy does not close an unreadable file.
            with open(self.path, "rb") as file:
                profile = np.load(file, allow_pickle=False)
                if isinstance(profile, np.ndarray):
                    raise ValueError("expected several arrays by name, found one")
                return {name: np.asarray(profile[name], dtype=np.float64) for name in _ARRAYS}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error


TimingModel = StepTimingModel | SplitTimingModel

Timing = Polynomial | Constant | Interpolated | Physical | MeasuredKernels | Aiconfigurator | RecordedSteps
