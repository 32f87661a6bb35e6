"""Quantities over time: step functions of worker samples, and windows of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.statistics import Float64Column, nearest_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.run.timeline import Timeline
    from understudy.workload.columns import Int32Column, Int64Column


@dataclass(frozen=True, eq=False, slots=True)
class StepFunction:
    """A value that changes at `times_ns` (ascending) and is constant in between; 0 before the first."""

    times_ns: Int64Column
    values: Int64Column

    @classmethod
    def fleet(cls, timeline: Timeline, values: Int64Column) -> StepFunction:
        """Sum a sample column over the workers, each with its latest sample."""
        by_worker = np.lexsort((timeline.sample_time_ns, timeline.sample_worker))
        worker = timeline.sample_worker[by_worker]
        change = np.diff(values[by_worker], prepend=np.int64(0))
        first = np.flatnonzero(np.diff(worker, prepend=np.int32(-1)))
        change[first] = values[by_worker][first]
        by_time = np.argsort(timeline.sample_time_ns[by_worker], kind="stable")
        times = timeline.sample_time_ns[by_worker][by_time]
        last_at_time = np.flatnonzero(np.diff(times, append=np.int64(-1)))
        return cls(times[last_at_time], np.cumsum(change[by_time])[last_at_time])

    def means(self, edges_ns: Float64Column) -> Float64Column:
        """Return the mean over each interval between consecutive `edges_ns` (ascending)."""
        if not len(self.times_ns):
            return np.zeros(len(edges_ns) - 1)
        knots = np.append(self.times_ns, max(float(edges_ns[-1]), float(self.times_ns[-1])))
        area = np.concatenate(([0.0], np.cumsum(np.diff(knots) * self.values)))
        result: Float64Column = np.diff(np.interp(edges_ns, knots, area)) / np.diff(edges_ns)
        return result


def worker_means(timeline: Timeline, *columns: Int64Column) -> list[Float64Column]:
    """Return the mean of each sample column over the run, per worker; NaN without samples or duration."""
    start, end = timeline.start_ns, timeline.end_ns
    if end <= start or not len(timeline.sample_time_ns):
        return [np.full(timeline.num_workers, np.nan) for _ in columns]
    order = np.lexsort((timeline.sample_time_ns, timeline.sample_worker))
    worker = timeline.sample_worker[order]
    since = timeline.sample_time_ns[order]
    until = np.append(since[1:], end)
    until[np.flatnonzero(np.diff(worker))] = end
    valid_ns = np.clip(until, start, end) - np.clip(since, start, end)
    return [
        np.bincount(worker, valid_ns * column[order].astype(np.float64), timeline.num_workers) / (end - start)
        for column in columns
    ]


def covered_ns(begin_ns: Int64Column, end_ns: Int64Column, group: Int32Column, groups: int) -> Float64Column:
    """Return the time that the intervals of each group cover, in ns; where intervals overlap, it counts once."""
    if not len(begin_ns):
        return np.zeros(groups)
    order = np.lexsort((begin_ns, group))
    # Groups follow each other on one axis, so that one running maximum serves all.
    shift = group[order] * (np.int64(end_ns.max()) - np.int64(begin_ns.min()) + 1)
    begin, end = begin_ns[order] + shift, end_ns[order] + shift
    reached = np.maximum.accumulate(np.concatenate((begin[:1], end[:-1])))
    new = np.maximum(end - np.maximum(begin, reached), 0)
    return np.bincount(group[order], new, groups).astype(np.float64)


def windows(timeline: Timeline, count: int) -> Float64Column:
    """Split the run's duration into `count` equal windows; return their count + 1 edges in ns."""
    start = timeline.start_ns
    return np.linspace(start, max(timeline.end_ns, start + 1), count + 1)


def window_of(times_ns: Int64Column, edges_ns: Float64Column) -> NDArray[np.intp]:
    """Return the index of each time's window; the last window includes its end."""
    index = np.searchsorted(edges_ns, times_ns, side="right") - 1
    return np.minimum(index, len(edges_ns) - 2)


def window_percentile(values: Float64Column, window: NDArray[np.intp], count: int, p: int) -> Float64Column:
    """Return percentile p (nearest rank) of the values in each of `count` windows; NaN for empty ones."""
    order = np.lexsort((values, window))
    sizes = np.bincount(window, minlength=count)
    starts = np.cumsum(sizes) - sizes
    result = np.full(count, np.nan)
    for index in np.flatnonzero(sizes).tolist():
        result[index] = values[order[starts[index] + nearest_rank(p, int(sizes[index]))]]
    return result
