"""Where the milliseconds of a run come from, and what they spend outside of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.engines.timing import TimingModel
    from understudy.run.pools import WorkerPool
    from understudy.run.timeline import Timeline

BEFORE_ENGINE = 0.6
"""Of the time between client and engine, the part before it."""


def front_end_ns(pools: Sequence[WorkerPool], timing: TimingModel | None) -> int:
    """What a request spends outside of its engine until its first token is out: pools share one front end."""
    if timing is not None:
        return 0
    found = {pool.engine.timing.front_end_ms for pool in pools}
    if len(found) > 1:
        raise ConfigError(f"timing.front_end_ms must be the same in all pools, got {sorted(found)}")
    return round(found.pop() * 1e6)


def seen_by_client(timeline: Timeline, outside_ns: int) -> Timeline:
    """The timeline with that time around the engine: a request arrives when it is sent, a token when it is received."""
    if outside_ns == 0:
        return timeline

    def later(name: str, by_ns: int) -> Any:
        column = getattr(timeline, name)
        return np.where(column >= 0, column + by_ns, column)

    shifted = {
        name: later(name, outside_ns) for name in ("first_token_ns", "second_token_ns", "last_token_ns")
    }
    # A request that was never admitted ends where it arrived.
    ended = np.where(timeline.first_admit_ns >= 0, later("finish_ns", outside_ns), timeline.finish_ns)
    before_ns = round(outside_ns * BEFORE_ENGINE)
    shifted |= {name: later(name, before_ns) for name in ("queued_ns", "first_admit_ns")}
    return replace(timeline, finish_ns=ended, **shifted)


class StepTimes(Protocol):
    """Who took steps: how long all of them were, and those outside of what the timing model was made from."""

    @property
    def step_ns(self) -> int:
        """Of all of them."""

    @property
    def uncovered_ns(self) -> int:
        """Of those outside."""


def outside_share(taken: Iterable[StepTimes]) -> float:
    """The share of the time of these steps that stands on steps like none before."""
    totals = [(one.uncovered_ns, one.step_ns) for one in taken]
    outside, whole = (sum(column) for column in zip(*totals, strict=True))
    return outside / whole if whole else 0.0


def describe_times(
    pools: Sequence[WorkerPool],
    timing: TimingModel | None,
    steps: StepTimes,
) -> dict[str, Any]:
    """For the report: in words where times come from, and which share of them stands on steps like none before."""
    if timing is not None:
        told = getattr(timing, "describe_origin", None)
        origins = [f"a timing model in Python, {type(timing).__qualname__}" if told is None else told()]
    else:
        origins = list(dict.fromkeys(pool.engine.timing.describe_origin() for pool in pools))
    return {
        "from": "; ".join(origins),
        "outside_domain_share": outside_share([steps]),
        "front_end_ms": front_end_ns(pools, timing) / 1e6,
    }


def times_in_words(times: dict[str, Any] | None) -> str:
    """One line of it; None is of a report that does not say it, which is told as well."""
    if times is None:
        return "a source that its report does not name"
    words = str(times["from"])
    if times["outside_domain_share"] > 0:
        words += (
            f"; {times['outside_domain_share']:.1%} of the time in steps outside of what that was fitted on"
        )
    if times["front_end_ms"] > 0:
        words += f"; TTFT and E2E count {round(times['front_end_ms'], 2):g} ms between client and engine"
    return words


def lateness_in_words(late_ms: dict[str, float]) -> str:
    """One line of how late the machine was that a run was played on."""
    return (
        f"tokens p50 {late_ms['token_p50']:.1f} ms, p99 {late_ms['token_p99']:.1f} ms; "
        f"first tokens at the client p99 {late_ms['client_first_token_p99']:.1f} ms"
    )
