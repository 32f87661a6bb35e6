"""The worst hour of a run: the window of arrivals in which fewest requests met the objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.report.goodput import ratio
from understudy.report.latency import NS_PER_S, Latencies, present
from understudy.report.metric import Metric
from understudy.report.statistics import Statistics
from understudy.report.thresholds import MIN_REQUESTS
from understudy.text import duration, quantity, significant

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.report.goodput import Slo
    from understudy.run.timeline import Timeline

HOUR_S = 3_600.0
_STEPS = 4
"""A window slides by this part of its length."""

WORST_HOUR_METRICS = (
    Metric(
        "worst_hour.start_s",
        "Worst hour, start",
        "s",
        "Start of the hour in which fewest requests were good (without objectives: most arrived), after the first "
        "arrival. Windows of an hour slide over the arrivals by quarters; those with at least 20 requests count. Of "
        "equal ones, that with most requests, then the first. Only in runs whose arrivals span two hours.",
    ),
    Metric("worst_hour.length_s", "Worst hour, length", "s", "Length of the window: 3,600."),
    Metric("worst_hour.requests", "Worst hour, requests", "requests", "Requests that arrived in the hour."),
    Metric("worst_hour.requests_per_s", "Worst hour, arrivals", "requests/s", "Those requests ÷ length."),
    Metric(
        "worst_hour.attainment",
        "Worst hour, SLO attainment",
        "ratio",
        "Good requests among those that arrived in the hour ÷ these.",
    ),
    Metric("worst_hour.ttft_p99_ms", "Worst hour, TTFT p99", "ms", "Over completed ones of these requests."),
    Metric("worst_hour.e2e_p99_ms", "Worst hour, E2E p99", "ms", "Over completed ones of these requests."),
)


@dataclass(frozen=True, slots=True)
class WorstHour:
    """The window of arrivals with the lowest attainment; without objectives, with the most requests."""

    start_s: float
    """Start after the first arrival."""
    length_s: float
    requests: int
    requests_per_s: float
    attainment: float
    """Share of good requests; NaN without objectives."""
    ttft_p99_ms: float
    e2e_p99_ms: float

    @classmethod
    def of(cls, timeline: Timeline, slo: Slo | None, length_s: float = HOUR_S) -> WorstHour | None:
        """Find the worst window; None if arrivals span less than two windows, or no window has 20 requests."""
        rows = np.flatnonzero(timeline.arrival_ns >= 0)
        arrived = timeline.arrival_ns[rows]
        length_ns = round(length_s * NS_PER_S)
        if not len(rows) or int(arrived.max() - arrived.min()) < 2 * length_ns:
            return None
        first, step_ns = int(arrived.min()), max(length_ns // _STEPS, 1)
        place = (arrived - first) // step_ns
        good = (timeline.completed if slo is None else slo.met(timeline))[rows]
        counts, goods = (_sum_windows(np.bincount(place, weights)) for weights in (None, good))
        shares = np.ones(len(counts)) if slo is None else goods / np.maximum(counts, 1)
        counted = np.flatnonzero(counts >= MIN_REQUESTS)
        if not len(counted):
            return None
        worst = int(counted[np.lexsort((counted, -counts[counted], shares[counted]))[0]])
        inside = rows[(place >= worst) & (place < worst + _STEPS)]
        latencies = Latencies.of(timeline)
        return cls(
            start_s=worst * step_ns / NS_PER_S,
            length_s=length_s,
            requests=len(inside),
            requests_per_s=ratio(len(inside), length_s),
            attainment=math.nan if slo is None else float(shares[worst]),
            ttft_p99_ms=Statistics.of(present(latencies.ttft_ms[inside])).p99,
            e2e_p99_ms=Statistics.of(present(latencies.e2e_ms[inside])).p99,
        )

    def describe(self, whole_per_s: float) -> str:
        """Return the hour in one line; `whole_per_s` are the requests per s of the whole run."""
        attained = "" if math.isnan(self.attainment) else f"{quantity(self.attainment, 'ratio')} in time, "
        return (
            f"from {duration(self.start_s)} on: {attained}TTFT p99 {self.ttft_p99_ms:,.0f} ms, "
            f"{significant(self.requests_per_s)} requests/s (whole run: {significant(whole_per_s)})"
        )


def format_length(length_s: float) -> str:
    """Format the length of a window: 1 h, 30 min, 90 s."""
    for unit, seconds in (("h", HOUR_S), ("min", 60.0)):
        if length_s % seconds == 0:
            return f"{length_s / seconds:g} {unit}"
    return f"{length_s:g} s"


def _sum_windows(steps: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sums over every window of consecutive steps."""
    sums = np.concatenate(([0.0], np.cumsum(steps)))
    windows: NDArray[np.float64] = sums[_STEPS:] - sums[:-_STEPS]
    return windows
