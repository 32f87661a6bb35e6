"""Timing models: how long a step takes. Plain immutable data that a configuration names by `kind`."""

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
    """A timing model written in Python, asked once a step. Milliseconds, not negative, finite."""

    def step_ms(self, step: StepLoad, /) -> float:
        """Of the whole step."""


class SplitTimingModel(Protocol):
    """One that times prompts and decoding apart, as Dynamo's mocker does; the two are added."""

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:
        """`requests` compute prompt tokens; on average `mean_input` are done afterwards, `mean_cached` before."""

    def decode_ms(
        self, requests: int, context_tokens: int, mean_context: int, capacity_tokens: int, /
    ) -> float:
        """`requests` sample a token each over `context_tokens` together; the cache holds `capacity_tokens`."""


class Polynomial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="polynomial"):
    """Prefill quadratic in new tokens, decode quadratic in KV utilisation: the default of Dynamo's mocker."""

    front_end_ms: ClassVar[float] = 0.0

    def described_origin(self) -> str:
        """Where its times come from."""
        return "a polynomial of no GPU, that of Dynamo's mocker: whatever the model and the hardware"

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model."""
        return polynomial_timing(speedup_ratio, decode_speedup_ratio)


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """The same time for every prefill, and for every decode."""

    prefill_ms: float
    decode_ms: float
    front_end_ms: ClassVar[float] = 0.0

    def described_origin(self) -> str:
        """Where its times come from."""
        return (
            f"constants that were given: {self.prefill_ms:g} ms of prefill, {self.decode_ms:g} ms of decode"
        )

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
    front_end_ms: ClassVar[float] = 0.0

    def described_origin(self) -> str:
        """Where its times come from."""
        return f"a planner's profile, {self.path}, extrapolated past its grid"

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model. ConfigError names the file, and the array at fault."""
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
                speedup_ratio,
                decode_speedup_ratio,
            )
        except ConfigError as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error

    def _load(self) -> dict[str, npt.NDArray[np.float64]]:
        import zipfile

        import numpy as np

        try:
            # Opened here, because numpy does not close a file that it cannot read.
            with open(self.path, "rb") as file:
                profile = np.load(file, allow_pickle=False)
                if isinstance(profile, np.ndarray):
                    raise ValueError("expected several arrays by name, found one")
                return {name: np.asarray(profile[name], dtype=np.float64) for name in _ARRAYS}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"timing.path {self.path}: {error}") from error


TimingModel = StepTimingModel | SplitTimingModel

Timing = Polynomial | Constant | Interpolated | Physical | MeasuredKernels | Aiconfigurator | RecordedSteps
