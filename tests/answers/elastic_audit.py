"""Recomputes, from one line per request and the states of workers, what a fleet that changes cost and how it recovered.

Everything is counted here anew, in plain Python: nothing of the report's code is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Change = tuple[float, int, str]
    """When (s) a worker entered a state."""

PAID = ("starting", "ready", "draining", "restarting")
BIN_S = 5.0
BINS = 3


@dataclass(frozen=True)
class ElasticAnswer:
    """Numbers of a fleet that changes."""

    gpu_hours: float
    good: int
    good_per_gpu_hour: float
    recovery_s: float | None
    """From the steepest rise of arrivals until no more requests waited than workers were ready; None: no such rise."""


def recompute(
    lines: Sequence[Mapping[str, Any]], changes: Sequence[Change], end_s: float, *, good_ttft_ms: float
) -> ElasticAnswer:
    """Recompute the numbers. `lines`: requests, with times in ms; `changes`: in order of time."""
    paid_s = 0.0
    ready: dict[float, int] = {}
    workers = {worker for _, worker, _ in changes}
    for worker in workers:
        own = [(at, state) for at, other, state in changes if other == worker]
        for (since, state), (until, _) in pairwise([*own, (end_s, "end")]):
            if state in PAID:
                paid_s += max(min(until, end_s) - min(since, end_s), 0.0)
            if state == "ready":
                ready[since] = ready.get(since, 0) + 1
                ready[until] = ready.get(until, 0) - 1
    good = sum(
        line["status"] == "completed" and line["first_token_ms"] - line["arrival_ms"] <= good_ttft_ms
        for line in lines
    )
    hours = paid_s / 3600
    return ElasticAnswer(hours, good, good / hours, _recover(lines, ready, end_s))


def _recover(lines: Sequence[Mapping[str, Any]], ready: Mapping[float, int], end_s: float) -> float | None:
    step_s = _find_step([line["arrival_ms"] / 1e3 for line in lines])
    if step_s is None:
        return None
    # +1 for a worker that is ready or a request that waits, each from a time on.
    changes: list[tuple[float, int, int]] = [(at, change, 0) for at, change in ready.items()]
    for line in lines:
        admitted_ms = line["first_admit_ms"]
        left_s = end_s if admitted_ms is None else admitted_ms / 1e3
        changes += [(line["arrival_ms"] / 1e3, 0, 1), (left_s, 0, -1)]
    changes.sort(key=lambda change: change[0])
    workers = waiting = 0
    over_since: float | None = None
    longest = (0.0, 0.0)
    for place, (at_s, more_workers, more_waiting) in enumerate(changes):
        workers += more_workers
        waiting += more_waiting
        if place + 1 < len(changes) and changes[place + 1][0] == at_s:
            continue
        if waiting > workers and over_since is None:
            over_since = at_s
        elif waiting <= workers and over_since is not None:
            spent = at_s - max(over_since, step_s)
            if at_s > step_s and spent > longest[0]:
                longest = (spent, at_s - step_s)
            over_since = None
    if over_since is not None and end_s - max(over_since, step_s) > longest[0]:
        return end_s - step_s
    return longest[1]


def _find_step(arrivals_s: Sequence[float]) -> float | None:
    counts = [0] * (int(max(arrivals_s) // BIN_S) + 1)
    for at_s in arrivals_s:
        counts[int(at_s // BIN_S)] += 1
    best: tuple[int, int] | None = None
    for place in range(BINS, len(counts) - BINS + 1):
        before, then = sum(counts[place - BINS : place]), sum(counts[place : place + BINS])
        if then >= 2 * before and (best is None or then - before > best[0]):
            best = (then - before, place)
    return None if best is None else best[1] * BIN_S
