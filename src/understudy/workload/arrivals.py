"""How load arrives: the gaps between sessions (`Burst` … `Gamma`), and who sets the pace (`…Loop`).

All are plain immutable data. A configuration file names them by `kind`, for example `{kind: poisson, qps:
10}`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.checks import whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="burst"):
    """Everything arrives at 0."""


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """One session every 1/qps seconds."""

    qps: float

    def __post_init__(self) -> None:
        _check_positive("qps", self.qps)


class Poisson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="poisson"):
    """Exponential gaps of mean 1/qps seconds."""

    qps: float

    def __post_init__(self) -> None:
        _check_positive("qps", self.qps)


class Gamma(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gamma"):
    """Gamma gaps of mean 1/qps seconds.

    `burstiness` is the shape, as vLLM's benchmark calls it: the gaps' standard deviation is mean/√burstiness.
    1 is Poisson; below 1 arrivals clump; above they even out.
    """

    qps: float
    burstiness: float

    def __post_init__(self) -> None:
        _check_positive("qps", self.qps)
        _check_positive("burstiness", self.burstiness)


ArrivalProcess = Burst | Constant | Poisson | Gamma


class OpenLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="open_loop"):
    """Requests come when the workload says, however busy the fleet is.

    A first turn arrives at its timestamp, turn k a delay after turn k−1 completed. Timestamps are shifted so
    that the first is 0; timestamps and delays are divided by `arrival_rate_scale`.
    """

    arrival_rate_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("arrival_rate_scale", self.arrival_rate_scale)


class ClosedLoop(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="kind",
    tag="closed_loop",
):
    """At most `concurrency` sessions at a time, started in row order as slots come free; no timestamps.

    A session keeps its slot through all its turns and think times (delays are kept). A request arrives when
    it is dispatched, so waiting for a slot is not part of its latency. A slot is empty for `turnaround_ms` between two
    sessions: what a client needs to see the end of one and to send the next.
    """

    concurrency: int
    turnaround_ms: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "concurrency", whole_number("concurrency", self.concurrency, 1))
        if not 0 <= self.turnaround_ms < 1e9:
            raise ConfigError(f"turnaround_ms must be finite and not negative, got {self.turnaround_ms}")


LOCKSTEP_NS = 1_000_000
"""A step in lockstep."""


class Lockstep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lockstep"):
    """Every worker takes a step every millisecond, busy or not, whatever its timing model says.

    A request arrives at its timestamp, before the step that begins then: millisecond s is step s. So are schedules
    recorded.
    """


def arrival_times_ns(process: ArrivalProcess, sessions: int, rng: np.random.Generator) -> Int64Column:
    """Draw when each of `sessions` sessions begins: the first at 0, never falling, each rounded once.

    Errors: ConfigError when the last would be past 2^63 ns.
    """
    match process:
        case Burst():
            return np.zeros(sessions, np.int64)
        case Constant(qps=qps):
            times_s = np.arange(sessions) / qps
        case Poisson(qps=qps):
            times_s = _after_gaps(rng.exponential(1 / qps, max(sessions - 1, 0)), sessions)
        case Gamma(qps=qps, burstiness=shape):
            times_s = _after_gaps(rng.gamma(shape, 1 / (qps * shape), max(sessions - 1, 0)), sessions)
    if sessions and not times_s[-1] * 1e9 < 2**63:
        raise ConfigError(f"qps {process.qps} puts the last of {sessions} sessions past 2^63 ns")
    return np.rint(times_s * 1e9).astype(np.int64)


def _after_gaps(gaps_s: NDArray[np.float64], sessions: int) -> NDArray[np.float64]:
    times_s = np.zeros(sessions)
    np.cumsum(gaps_s, out=times_s[1:])
    return times_s


def _check_positive(field: str, value: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise ConfigError(f"{field} must be a finite number above 0, got {value!r}")
