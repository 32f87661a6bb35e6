"""Judge from one run whether fewer workers would do, where replays of them exceed the limit of work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.latency import NS_PER_S
from understudy.report.series import StepFunction
from understudy.report.verdict import Verdict, list_pools
from understudy.text import quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.replay_budget import ReplayBudget

_MINUTE_NS = 60 * NS_PER_S
_MOST_PREFILL = 0.25
"""Share of time in prefills that half of the workers may have in the busiest hour."""
_MOST_KV = 0.5
"""Share of the KV cache that half of the workers may need in the busiest minute."""
_MOST_RUNNING = 0.3
"""Share of their places for running requests that half of the workers may need in the busiest minute."""
_SLACK = 0.5
"""Share of each objective that the 99th percentile of the worst hour may take."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of each of `workers` workers in the busiest stretch of a run."""

    workers: int
    prefill: float
    """Share of time in prefills, in the worst hour."""
    kv: float
    """Share of the KV cache in the busiest minute."""
    running: float
    """Share of the places for running requests in the busiest minute; NaN without a limit."""

    @classmethod
    def of(cls, report: ReportData, workers: int) -> Load:
        """Spread the load of the run's busiest stretch over `workers` equal workers."""
        timeline = report.columns
        start, end = float(timeline.start_ns), float(timeline.end_ns)
        if report.worst_hour is not None:
            start += report.worst_hour.start_s * NS_PER_S
            end = start + report.worst_hour.length_s * NS_PER_S
        done = (timeline.first_admit_ns >= 0) & (timeline.first_token_ns >= 0)
        inside = done & (timeline.arrival_ns >= start) & (timeline.arrival_ns < end)
        prefill_ns = float((timeline.first_token_ns - timeline.first_admit_ns)[inside].sum())
        first, last = float(timeline.start_ns), float(timeline.end_ns)
        minutes = max(1, min(100_000, math.ceil((last - first) / _MINUTE_NS)))
        edges = np.linspace(first, max(last, first + 1), minutes + 1)
        used = StepFunction.fleet(timeline, timeline.sample_used_blocks).means(edges).max()
        running = StepFunction.fleet(timeline, timeline.sample_running).means(edges).max()
        places = {pool.engine.get("max_num_seqs") for pool in list_pools(report)}
        limit = places.pop() if len(places) == 1 else None
        return cls(
            workers=workers,
            prefill=prefill_ns / max(end - start, 1) / workers,
            kv=float(used) / (timeline.blocks_per_worker * workers),
            running=float(running) / (limit * workers) if limit else math.nan,
        )

    @property
    def is_light(self) -> bool:
        """Whether the workers have room to spare."""
        crowded = not math.isnan(self.running) and self.running > _MOST_RUNNING
        return self.prefill <= _MOST_PREFILL and self.kv <= _MOST_KV and not crowded


def estimate_oversized(report: ReportData, flags: tuple[str, ...], budget: ReplayBudget) -> Verdict | None:
    """Build the verdict that half of the workers would do, from the load of the busiest hour; None if unclear.

    `flags` are the smaller fleets that were not replayed.
    """
    workers = report.columns.num_workers
    if workers < 2 or report.run.pools or report.handoff is not None or not flags or not _has_slack(report):
        return None
    load = Load.of(report, workers // 2)
    if not load.is_light:
        return None
    hour = "the worst hour" if report.worst_hour is not None else "the run"
    return Verdict(
        "oversized",
        f"Oversized: {load.workers:,} of the {workers:,} workers should do. In {hour} they would spend "
        f"{quantity(load.prefill, 'ratio')} of the time in prefills, and in the busiest minute use "
        f"{quantity(load.kv, 'ratio')} of their KV cache.",
        f"This is an estimate, without a replay: {budget.describe()}. Prove it with the same command and "
        f"--workers {load.workers}.",
    )


def _has_slack(report: ReportData) -> bool:
    """Whether the tails are far within the objectives; without objectives, whether next to nothing waits."""
    goodput, hour = report.goodput, report.worst_hour
    if goodput is None:
        return report.queue_ms.mean <= 0.01 * report.e2e_ms.mean
    ttft_ms = max(report.ttft_ms.p99, 0.0 if hour is None else hour.ttft_p99_ms)
    e2e_ms = max(report.e2e_ms.p99, 0.0 if hour is None else hour.e2e_p99_ms)
    limits = (
        (goodput.slo.ttft_ms, ttft_ms),
        (goodput.slo.itl_ms, report.tpot_ms.p99),
        (goodput.slo.e2e_ms, e2e_ms),
    )
    return all(limit is None or not tail > _SLACK * limit for limit, tail in limits)
