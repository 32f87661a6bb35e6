"""Arrival processes (`Burst` … `Gamma`: gaps between sessions) and load modes (`OpenLoop` … `Lockstep`).

All are immutable data. A configuration file names them by `kind`, for example `{kind: poisson, qps: 10}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import numpy as np

from understudy.checks import positive_number, whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="burst"):
    """All sessions arrive at time 0."""


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
    """Send requests at the workload's timestamps, however busy the fleet is.

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
    """Run at most `concurrency` sessions at a time, in row order; ignore timestamps.

    A session keeps its slot through all its turns and think times (delays are kept). A request arrives when
    it is dispatched, so waiting for a slot is not part of its latency. A slot stays empty for `turnaround_ms` between
    two sessions: the time a client needs to receive the end of one and send the next.
    """

    concurrency: int
    turnaround_ms: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "concurrency", whole_number("concurrency", self.concurrency, 1))
        if not 0 <= self.turnaround_ms < 1e9:
            raise ConfigError(f"turnaround_ms must be a finite number from 0, got {self.turnaround_ms}")


Clock = Literal["client", "recorded"]


class Plays(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind", tag="plays"
):
    """Run the plays of a graph: requests arrive when those that they wait for have arrived or ended.

    With the clock `client`, a request arrives as long after the answers it waits for as it did in the trace; with
    `recorded`, also no earlier than at its recorded time. At most `lanes` plays run at a time, in row order (0: all,
    each from its start). Delays and recorded times are divided by `arrival_rate_scale`.
    """

    lanes: int = 0
    clock: Clock = "client"
    arrival_rate_scale: float = 1.0
    warm_up: bool = False
    """Begin with a snapshot: the first plays are cut within their middle half, and prompts of their live sessions are
    sent first, with one token of output each. Measurements begin when these have ended."""
    duration_s: float = 0.0
    """From then on plays start, again and again with blocks of their own, and requests are sent for so long; 0: every
    play runs once, to its end."""
    grace_s: float = 30.0
    """Requests that run at the end of the duration are cancelled so much later."""
    play_idle_s: float | None = None
    """Longest time in which no request of a play runs; then its next one comes. 0: no limit; None: no limit, or 300 s
    with a duration."""
    fleet_idle_s: float | None = None
    """The same of all plays together; None: no limit, or 10 s with a duration."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "lanes", whole_number("lanes", self.lanes, 0, 2**32 - 1))
        if self.clock not in get_args(Clock):
            raise ConfigError(f"clock must be client or recorded, got {self.clock!r}")
        _check_positive("arrival_rate_scale", self.arrival_rate_scale)
        for name in ("duration_s", "grace_s", "play_idle_s", "fleet_idle_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1e9:
                raise ConfigError(f"{name} must be a time in seconds, from 0 to 1e9, got {value}")
        if self.grace_s != 30 and not self.duration_s:
            raise ConfigError("grace_s has no effect without duration_s; give both")
        limited = [
            name for name in ("warm_up", "duration_s", "play_idle_s", "fleet_idle_s") if getattr(self, name)
        ]
        if limited and not self.lanes:
            raise ConfigError(f"{limited[0]} needs lanes (--lanes N): the number of plays at a time")

    @property
    def is_profile(self) -> bool:
        """Whether plays warm up, or end at a time."""
        return self.warm_up or self.duration_s > 0

    @property
    def idle_caps_s(self) -> tuple[float, float]:
        """Longest idle time of a play, and of all plays; 0: no limit."""
        usual = (300.0, 10.0) if self.duration_s else (0.0, 0.0)
        given = (self.play_idle_s, self.fleet_idle_s)
        play, fleet = (own if own is not None else other for own, other in zip(given, usual, strict=True))
        return play, fleet


LOCKSTEP_NS = 1_000_000
"""Duration of a step in lockstep."""


class Lockstep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lockstep"):
    """Step every worker once per millisecond, busy or idle; ignore timing models.

    A request arrives at its timestamp, before the step that begins then: millisecond s is step s, as in recorded
    schedules.
    """


def arrival_times_ns(process: ArrivalProcess, sessions: int, rng: np.random.Generator) -> Int64Column:
    """Sample the start times of `sessions` sessions: the first is 0, ascending, each rounded once.

    Errors: ConfigError if the last is past 2^63 ns.
    """
    match process:
        case Burst():
            return np.zeros(sessions, np.int64)
        case Constant(qps=qps):
            times_s = np.arange(sessions) / qps
        case Poisson(qps=qps):
            times_s = _sum_gaps(rng.exponential(1 / qps, max(sessions - 1, 0)), sessions)
        case Gamma(qps=qps, burstiness=shape):
            times_s = _sum_gaps(rng.gamma(shape, 1 / (qps * shape), max(sessions - 1, 0)), sessions)
    if sessions and not times_s[-1] * 1e9 < 2**63:
        raise ConfigError(f"qps {process.qps} puts the last of {sessions} sessions past 2^63 ns; raise it")
    return np.rint(times_s * 1e9).astype(np.int64)


def _sum_gaps(gaps_s: NDArray[np.float64], sessions: int) -> NDArray[np.float64]:
    times_s = np.zeros(sessions)
    np.cumsum(gaps_s, out=times_s[1:])
    return times_s


def _check_positive(field: str, value: float) -> None:
    is_scale = field == "arrival_rate_scale"
    positive_number(field, value, remedy="1 leaves the times as they are, 2 halves them" if is_scale else "")
