"""What a changing fleet cost, and how its scaler followed the load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.goodput import ratio
from understudy.report.latency import NS_PER_S
from understudy.report.series import StepFunction
from understudy.run.worker_lives import Life

if TYPE_CHECKING:
    from understudy.report.goodput import Goodput
    from understudy.run.facts import RunFacts
    from understudy.run.timeline import Timeline
    from understudy.run.worker_lives import WorkerLives
    from understudy.workload.columns import Int64Column

HOUR_NS = 3600 * NS_PER_S
FLAP_S = 60.0
"""Longest time between an order and a drain, or the reverse, that undo each other."""
FALL = 0.5
"""Share of its peak below which the arrival rate has fallen."""
BIN_NS = 5_000_000_000
"""Windows in which arrivals are counted."""
STEP_BINS = 3
"""Windows on either side of a load step."""


@dataclass(frozen=True, slots=True)
class QueueEpisode:
    """The longest time in which more requests waited than workers were ready. Times in s from the run's start."""

    start_s: float
    end_s: float
    first_order_s: float | None
    """When the first worker was ordered in it; None: none was."""
    last_ready_s: float | None
    """When the last worker that was ordered in it became ready."""
    fall_s: float | None
    """When arrivals had fallen to half of their peak in it."""
    workers_added: int


@dataclass(frozen=True, slots=True)
class FleetUse:
    """GPU time by state of the workers, and the scaler's changes."""

    gpu_hours: float
    gpu_hours_starting: float
    gpu_hours_draining: float
    cost: float | None
    """At the price of a GPU-hour; None without one."""
    good_per_gpu_hour: float
    """Requests within the objectives, or completed ones without objectives."""
    ready_mean: float
    ready_max: int
    started: int
    stopped: int
    flaps: int
    """Changes that were undone within a minute."""
    drains_while_queueing: int
    """Workers that were told to drain while more requests waited than workers were ready."""
    longest_queue: QueueEpisode | None
    recovery_s: float | None
    """Time from the largest rise of the arrival rate until requests did not queue; None without a rise to twice."""

    @classmethod
    def of(cls, timeline: Timeline, run: RunFacts, goodput: Goodput | None) -> FleetUse | None:
        """Compute it; None for a fleet without a scaler."""
        lives = timeline.lives
        if lives is None or not run.autoscale:
            return None
        end_ns = max(timeline.end_ns, 1)
        per_worker = float(run.autoscale.get("gpus_per_worker", 1)) / HOUR_NS
        hours = {
            state: sum(until - since for _, kind, since, until in lives.spans(end_ns) if kind == state)
            * per_worker
            for state in (Life.STARTING, Life.RESTARTING, Life.READY, Life.DRAINING)
        }
        whole = sum(hours.values())
        price = run.autoscale.get("price_per_gpu_hour")
        good = int(timeline.completed.sum()) if goodput is None else goodput.requests
        times, ready = lives.count_over_time((Life.READY,), end_ns)
        queued = _list_queued(timeline, times, ready)
        return cls(
            gpu_hours=whole,
            gpu_hours_starting=hours[Life.STARTING] + hours[Life.RESTARTING],
            gpu_hours_draining=hours[Life.DRAINING],
            cost=None if price is None else whole * float(price),
            good_per_gpu_hour=ratio(good, whole),
            ready_mean=float((np.diff(np.append(times, end_ns)) * ready).sum() / end_ns),
            ready_max=int(ready.max()),
            started=int((lives.life_state == Life.STARTING).sum()),
            stopped=int((lives.life_state == Life.STOPPED).sum()),
            flaps=_count_flaps(lives),
            drains_while_queueing=sum(
                any(since < at <= until for since, until in queued)
                for at in lives.life_ns[lives.life_state == Life.DRAINING].tolist()
            ),
            longest_queue=_describe_longest(timeline, lives, queued),
            recovery_s=_measure_recovery(timeline, queued),
        )


def _list_queued(timeline: Timeline, times: Int64Column, ready: Int64Column) -> list[tuple[int, int]]:
    """Return the times (from, to) in ns in which more requests waited than workers were ready."""
    queue = StepFunction.fleet(timeline, timeline.sample_waiting)
    if not len(queue.times_ns):
        return []
    knots = np.union1d(queue.times_ns, times)
    waiting = queue.values[np.maximum(np.searchsorted(queue.times_ns, knots, "right") - 1, 0)]
    waiting[knots < queue.times_ns[0]] = 0
    workers = ready[np.maximum(np.searchsorted(times, knots, "right") - 1, 0)]
    over = waiting > workers
    edges = np.flatnonzero(np.diff(over.astype(np.int8), prepend=0, append=0))
    ends = np.append(knots, max(timeline.end_ns, int(knots[-1])))
    return [(int(ends[edges[at]]), int(ends[edges[at + 1]])) for at in range(0, len(edges), 2)]


def _count_flaps(lives: WorkerLives) -> int:
    changes = [
        (at, state == Life.STARTING)
        for at, state in zip(lives.life_ns.tolist(), lives.life_state.tolist(), strict=True)
        if state in (Life.STARTING, Life.DRAINING)
    ]
    return sum(
        later[1] != earlier[1] and later[0] - earlier[0] <= FLAP_S * NS_PER_S
        for earlier, later in pairwise(changes)
    )


def _describe_longest(
    timeline: Timeline, lives: WorkerLives, queued: list[tuple[int, int]]
) -> QueueEpisode | None:
    if not queued:
        return None
    start, end = max(queued, key=lambda span: span[1] - span[0])
    orders = (lives.life_state == Life.STARTING) & (lives.life_ns >= start) & (lives.life_ns <= end)
    added = set(lives.life_worker[orders].tolist())
    ready = [
        at
        for at, worker, state in zip(
            lives.life_ns.tolist(), lives.life_worker.tolist(), lives.life_state.tolist(), strict=True
        )
        if state == Life.READY and worker in added
    ]
    return QueueEpisode(
        start_s=start / NS_PER_S,
        end_s=end / NS_PER_S,
        first_order_s=float(lives.life_ns[orders][0]) / NS_PER_S if added else None,
        last_ready_s=max(ready) / NS_PER_S if ready else None,
        fall_s=_find_fall(timeline, start, end),
        workers_added=len(ready),
    )


def _find_fall(timeline: Timeline, start_ns: int, end_ns: int) -> float | None:
    """Return when arrivals had fallen to half of their peak, up to the end of an episode; None if they did not."""
    arrivals = timeline.arrival_ns[timeline.arrival_ns >= 0]
    counts = np.bincount(arrivals // BIN_NS)
    first, last = start_ns // BIN_NS, min(end_ns // BIN_NS, len(counts) - 1)
    if last <= first:
        return None
    peak = first + int(counts[first : last + 1].argmax())
    low = np.flatnonzero(counts[peak : last + 1] <= FALL * counts[peak])
    return None if not len(low) else float((peak + int(low[0])) * BIN_NS) / NS_PER_S


def _measure_recovery(timeline: Timeline, queued: list[tuple[int, int]]) -> float | None:
    step_ns = _find_load_step(timeline)
    if step_ns is None:
        return None
    after = [span for span in queued if span[1] > step_ns]
    if not after:
        return 0.0
    longest = max(after, key=lambda span: span[1] - max(span[0], step_ns))
    return (longest[1] - step_ns) / NS_PER_S


def _find_load_step(timeline: Timeline) -> int | None:
    """Return the time (ns) at which the arrival rate rises most, to twice or more; None if it does not."""
    arrivals = timeline.arrival_ns[timeline.arrival_ns >= 0]
    if not len(arrivals):
        return None
    counts = np.bincount(arrivals // BIN_NS).astype(np.float64)
    if len(counts) <= 2 * STEP_BINS:
        return None
    means = np.convolve(counts, np.ones(STEP_BINS) / STEP_BINS, "valid")
    before, then = means[:-STEP_BINS], means[STEP_BINS:]
    at = int((then - before).argmax())
    return (at + STEP_BINS) * BIN_NS if then[at] >= 2 * before[at] else None


def describe_use(use: FleetUse) -> str:
    """Describe the fleet's cost and changes in one line."""
    cost = "" if use.cost is None else f", {use.cost:,.2f} at the given price"
    return (
        f"{use.ready_mean:.1f} ready on average, at most {use.ready_max}; {use.started:,} started and {use.stopped:,} "
        f"stopped; {use.gpu_hours:.3f} GPU-hours ({use.gpu_hours * 3600:,.0f} GPU seconds){cost}, "
        f"{use.good_per_gpu_hour:,.0f} good requests per GPU-hour"
        + (f"; {use.recovery_s:.0f} s from the load step to recovery" if use.recovery_s else "")
    )
