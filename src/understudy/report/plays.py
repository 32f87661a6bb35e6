"""Plays of a run: how long each took, and what its critical path consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.graph import COMPLETION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.workload import RequestGraph, Workload
    from understudy.workload.columns import Int32Column, Int64Column


class PlayTimes(Protocol):
    """Times of requests: a `Timeline`, or those of a client."""

    @property
    def arrival_ns(self) -> Int64Column:
        """When each request arrived, −1 for never."""

    @property
    def first_admit_ns(self) -> Int64Column:
        """When its first step began, −1 for never."""

    @property
    def first_token_ns(self) -> Int64Column:
        """When its first token was there, −1 for never."""

    @property
    def finish_ns(self) -> Int64Column:
        """When it ended, −1 for never."""


PARTS = ("waiting", "gap", "queue", "transfer", "prefill", "decode")
"""Parts of a critical path: until an earliest time, between an event and the request that follows it (tools, think
times), until the first step of a request (apart from loads of its blocks: transfer), until its first token, and until
its end."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlayColumns:
    """One row per play; times in ns, −1 for a play with a request that never arrived or ended."""

    names: list[str]
    requests: Int32Column
    start_ns: Int64Column
    """Arrival of its first request."""
    makespan_ns: Int64Column
    """From there to the end of its last request."""
    parts_ns: dict[str, Int64Column]
    """Parts of the critical path; they add up to the makespan."""

    def __len__(self) -> int:
        """Return the number of plays."""
        return len(self.names)

    def rows(self) -> list[dict[str, object]]:
        """Return the plays as plain values, times in ms and None for a play that did not end."""
        return [
            {
                "play": name,
                "requests": int(self.requests[play]),
                "start_ms": None if self.makespan_ns[play] < 0 else float(self.start_ns[play] / 1e6),
                "makespan_ms": None if self.makespan_ns[play] < 0 else float(self.makespan_ns[play] / 1e6),
                "critical_path_ms": None
                if self.makespan_ns[play] < 0
                else {part: float(values[play] / 1e6) for part, values in self.parts_ns.items()},
            }
            for play, name in enumerate(self.names)
        ]

    def slowest(self) -> int | None:
        """Return the play with the longest makespan; None if none ended."""
        longest = int(self.makespan_ns.argmax()) if len(self) else -1
        return None if longest < 0 or self.makespan_ns[longest] < 0 else longest

    def describe(self) -> str:
        """Return a line with the makespans and the shares of the critical path."""
        ended = self.makespan_ns[self.makespan_ns >= 0]
        if not len(ended):
            return f"plays: {len(self):,}, none of which ended"
        p50, p99 = np.percentile(ended, [50, 99]) / 1e9
        unended = f" ({len(self) - len(ended):,} did not end)" if len(ended) < len(self) else ""
        parts = ", ".join(f"{name} {share:.1%}" for name, share in self.shares().items())
        return f"plays: {len(self):,}{unended}, makespan p50 {p50:,.1f} s, p99 {p99:,.1f} s; critical path: {parts}"

    def shares(self) -> dict[str, float]:
        """Return each part's share of all critical paths together."""
        ended = self.makespan_ns >= 0
        total = max(int(self.makespan_ns[ended].sum()), 1)
        return {name: int(values[ended].sum()) / total for name, values in self.parts_ns.items()}


def measure_plays(workload: Workload, timeline: PlayTimes) -> PlayColumns:
    """Measure the plays of a run.

    The critical path goes back from the last request of a play: to the event that its arrival waited for last, and
    so on.
    Errors: InvalidArgument if the workload has no graph.
    """
    graph = workload.graph
    if graph is None:
        raise InvalidArgument("the workload has no plays: its requests do not wait for one another")
    order = np.argsort(graph.play, kind="stable")
    counts = np.bincount(graph.play, minlength=graph.plays)
    plays = np.split(order, np.cumsum(counts)[:-1])
    start_ns = np.full(graph.plays, -1, np.int64)
    makespan_ns = np.full(graph.plays, -1, np.int64)
    parts_ns = {name: np.zeros(graph.plays, np.int64) for name in PARTS}
    for play, rows in enumerate(plays):
        arrivals, finishes = timeline.arrival_ns[rows], timeline.finish_ns[rows]
        if not len(rows) or (arrivals < 0).any() or (finishes < 0).any():
            continue
        start_ns[play] = arrivals.min()
        makespan_ns[play] = finishes.max() - arrivals.min()
        found = _trace_back(graph, timeline, int(rows[finishes.argmax()]), int(arrivals.min()))
        for name, time_ns in found.items():
            parts_ns[name][play] = time_ns
    return PlayColumns(
        names=graph.play_ids or [f"play_{play}" for play in range(graph.plays)],
        requests=counts.astype(np.int32),
        start_ns=start_ns,
        makespan_ns=makespan_ns,
        parts_ns=parts_ns,
    )


def _trace_back(graph: RequestGraph, timeline: PlayTimes, row: int, start_ns: int) -> dict[str, int]:
    """Divide the time from the start of a play to the end of a request among the parts."""
    parts = dict.fromkeys(PARTS, 0)
    following = -1  # arrival of the request behind
    for on, ends in critical_path(graph, timeline, row):
        arrival = int(timeline.arrival_ns[on])
        if following >= 0:
            parts["gap"] += following - int((timeline.finish_ns if ends else timeline.arrival_ns)[on])
        following = arrival
        if ends:
            finish = int(timeline.finish_ns[on])
            admitted, first = int(timeline.first_admit_ns[on]), int(timeline.first_token_ns[on])
            admitted = finish if admitted < 0 else admitted
            first = finish if first < 0 else first
            loading = min(_load_ns(timeline, on), admitted - arrival)
            parts["transfer"] += loading
            parts["queue"] += admitted - arrival - loading
            parts["prefill"] += first - admitted
            parts["decode"] += finish - first
    parts["waiting"] += following - start_ns
    return parts


def critical_path(graph: RequestGraph, timeline: PlayTimes, row: int) -> Iterator[tuple[int, bool]]:
    """Yield the requests of the path that ends with `row`, the last first.

    With each: whether the path passes through its end, or else only through its arrival.
    """
    edge: tuple[int, int, bool] | None = (row, 0, True)
    while edge is not None:
        yield edge[0], edge[2]
        edge = _last_event(graph, timeline, edge[0])


def _load_ns(timeline: PlayTimes, row: int) -> int:
    """Return how long a request was parked while its blocks were loaded; 0 without tiers."""
    tiers = getattr(timeline, "tiers", None)
    return 0 if tiers is None else int(tiers.parked_ns[row])


def _last_event(graph: RequestGraph, timeline: PlayTimes, row: int) -> tuple[int, int, bool] | None:
    """Return (row, time, whether it is its end) of the event for which an arrival waited last; None: for a time."""
    best: tuple[int, int, bool] | None = None
    reached = -1
    for at in range(int(graph.dependency_offsets[row]), int(graph.dependency_offsets[row + 1])):
        on, ends = int(graph.dependency_rows[at]), int(graph.dependency_triggers[at]) == COMPLETION
        event_ns = int((timeline.finish_ns if ends else timeline.arrival_ns)[on])
        if event_ns + int(graph.dependency_delay_ns[at]) > reached:
            best, reached = (on, event_ns, ends), event_ns + int(graph.dependency_delay_ns[at])
    return best
