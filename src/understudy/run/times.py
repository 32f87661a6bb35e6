"""Origin of a run's times, and the time that requests spend outside the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from understudy.errors import ConfigError
from understudy.run.facts import TimeFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.engines.timing import TimingModel
    from understudy.run.pools import WorkerPool
    from understudy.run.timeline import Timeline

BEFORE_ENGINE = 0.6
"""Share of the time between client and engine that is before the engine."""


def front_end_ns(pools: Sequence[WorkerPool], timing: TimingModel | None) -> int:
    """Return the ns between client and engine until the first token; ConfigError if pools differ."""
    if timing is not None:
        return 0
    found = {pool.engine.timing.front_end_ms for pool in pools}
    if len(found) > 1:
        raise ConfigError(f"timing.front_end_ms must be the same in all pools, got {sorted(found)}")
    return round(found.pop() * 1e6)


def add_front_end_time(timeline: Timeline, outside_ns: int) -> Timeline:
    """Add the time between client and engine: requests arrive when sent; the client sees tokens and ends later.

    Every end: a refusal or an abort passes the front end as an answer does.
    """
    if outside_ns == 0:
        return timeline

    def later(name: str, by_ns: int) -> Any:
        column = getattr(timeline, name)
        return np.where(column >= 0, column + by_ns, column)

    names = ("first_token_ns", "second_token_ns", "last_token_ns", "finish_ns")
    shifted = {name: later(name, outside_ns) for name in names}
    before_ns = round(outside_ns * BEFORE_ENGINE)
    shifted |= {name: later(name, before_ns) for name in ("queued_ns", "first_admit_ns")}
    return replace(timeline, **shifted)


class StepTimes(Protocol):
    """Total time of steps, and of those outside the domain that the timing model was fitted to."""

    @property
    def step_ns(self) -> int:
        """Total ns of all steps."""

    @property
    def uncovered_ns(self) -> int:
        """Total ns of steps outside the fitted domain."""


def compute_outside_share(taken: Iterable[StepTimes]) -> float:
    """Return the share of step time outside the fitted domain."""
    totals = [(one.uncovered_ns, one.step_ns) for one in taken]
    outside, whole = (sum(column) for column in zip(*totals, strict=True))
    return outside / whole if whole else 0.0


def describe_times(
    pools: Sequence[WorkerPool],
    timing: TimingModel | None,
    steps: StepTimes,
) -> TimeFacts:
    """Describe for the report the origin of times and the share outside the fitted domain."""
    if timing is not None:
        describe = getattr(timing, "describe_origin", None)
        origins = [
            f"a timing model in Python, {type(timing).__qualname__}" if describe is None else describe()
        ]
    else:
        origins = list(dict.fromkeys(pool.engine.timing.describe_origin() for pool in pools))
    return TimeFacts("; ".join(origins), compute_outside_share([steps]), front_end_ns(pools, timing) / 1e6)


def format_times(times: TimeFacts | None) -> str:
    """Format the origin of times in one line; None is a report without it."""
    if times is None:
        return "an unnamed source"
    words = times.source
    if times.outside_domain_share > 0:
        words += f"; {times.outside_domain_share:.1%} of the time in steps outside the fitted domain"
    if times.front_end_ms > 0:
        words += f"; TTFT and E2E include {round(times.front_end_ms, 2):g} ms between client and engine"
    return words


def format_lateness(late_ms: dict[str, float]) -> str:
    """Format in one line how late tokens were on the machine of a live run."""
    return (
        f"tokens p50 {late_ms['token_p50']:.1f} ms, p99 {late_ms['token_p99']:.1f} ms; "
        f"first tokens at the client p99 {late_ms['client_first_token_p99']:.1f} ms"
    )
