"""Candidates whose steps take longer or shorter, for the range of an answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.timing.accuracy import find_accuracy
from understudy.timing.engine_names import find_timed_engine
from understudy.timing.physical import Physical
from understudy.timing.presets import target_of

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate

ASSUMED_PERCENT = 30.0
"""Range of step times where no error was measured nearby."""


class TimeRange(NamedTuple):
    """By how much steps may take longer or shorter, in percent, and where that comes from."""

    percent: float
    origin: str

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of the shortest and the longest times."""
        return 1 / (1 + self.percent / 100), 1 + self.percent / 100


def scale_times(candidate: Candidate, factor: float) -> Candidate:
    """Return the candidate with all step times multiplied by `factor`. ConfigError if its times cannot be scaled."""
    if factor == 1:
        return candidate
    engine = candidate.settings.engine
    timing = engine.timing
    if not isinstance(timing, Physical):
        raise ConfigError(
            "timing: only times of a preset, a data sheet or a calibration have a range; leave it out"
        )
    scaled = {
        name: getattr(timing.coefficients, name) * factor
        for name in timing.coefficients.__struct_fields__
        if name.endswith("_ms")
    }
    timing = msgspec.structs.replace(
        timing, coefficients=msgspec.structs.replace(timing.coefficients, **scaled), basis=None
    )
    engine = msgspec.structs.replace(engine, timing=timing)
    return replace(candidate, settings=msgspec.structs.replace(candidate.settings, engine=engine))


def find_time_range(candidate: Candidate) -> TimeRange | None:
    """Return the range of a candidate's step times; None if its times cannot be scaled."""
    engine = candidate.settings.engine
    timing = engine.timing
    if not isinstance(timing, Physical):
        return None
    if timing.origin.residuals is not None and timing.origin.residuals.tpot_percent is not None:
        return TimeRange(
            2 * timing.origin.residuals.tpot_percent, "twice the median error of the calibration"
        )
    if timing.basis is None:
        return TimeRange(ASSUMED_PERCENT, "assumed: no error is known")
    deployed = timing.basis.deployment
    target = target_of(
        deployed.model, deployed.gpu, deployed.weights, find_timed_engine(kind_of(engine).name)
    )
    accuracy = find_accuracy(target)
    if accuracy.tpot_percent is None:
        return TimeRange(ASSUMED_PERCENT, "assumed: nothing near this deployment was measured")
    if accuracy.own is not None:
        return TimeRange(accuracy.tpot_percent, f"nine of ten of its {accuracy.own.rows} measured rows")
    names = ", ".join(dict.fromkeys(one.model for one in accuracy.near))
    return TimeRange(accuracy.tpot_percent, f"nine of ten measured rows of {names}")
