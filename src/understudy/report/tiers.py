"""`TiersReport`: hits and usage of the tiers of a run, and traffic of their links."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import Tier
from understudy.report.goodput import ratio
from understudy.report.latency import NS_PER_MS, NS_PER_S
from understudy.report.series import StepFunction, windows, worker_means
from understudy.report.statistics import Float64Column, Statistics
from understudy.run.tier_columns import BELOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import LinkUsage, TierSummary
    from understudy.run.facts import RunFacts
    from understudy.run.tier_columns import TierColumns
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import Int64Column

LINK_WINDOWS = 120


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier, summed over the workers of a pool; with several pools, the name starts with the pool's.

    Hit ratios are relative to all prompt tokens of the run, so they add up to `prefix_hit_ratio` over pools and tiers.
    An unlimited tier has no capacity (None), and NaN as residency.
    """

    tier: str
    hit_tokens_first: int
    hit_ratio_first: float
    hit_tokens_total: int
    hit_ratio_total: float
    capacity_blocks: int | None
    resident_mean: float
    resident_max: float
    resident_end: float
    stored_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, eq=False, slots=True)
class LinkUse:
    """Links of one kind: one per worker or one shared. With several pools, the name starts with the pool's.

    Series have one value per window of the run's duration. Utilisation of an unlimited link, or of a run without
    duration, is NaN.
    """

    name: str
    links: int
    bandwidth_gbps: float
    transfers: int
    bytes: int
    busy_s: float
    utilisation_mean: float
    utilisation_max: float
    window_s: float
    window_bytes: list[float]
    window_utilisation: list[float]


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of offloads and loads."""

    offloaded_blocks: int
    dropped_blocks: int
    onboards: int
    onboarded_blocks: int
    joined_loads: int
    slow_loads: int
    failed_loads: int
    room_waits: int
    deferred_lookups: int
    refused_stores: int
    flushed_copies: int


@dataclass(frozen=True, eq=False, slots=True)
class TiersReport:
    """Metrics of the tiers of a run; `understudy.report.tier_metrics` defines every number."""

    onboard_ms: Statistics
    parked_ms: Statistics
    room_wait_ms: Statistics
    parked_s: float
    room_wait_s: float
    held_mean: float
    held_max: float
    counts: TierCounts
    tiers: tuple[TierUse, ...]
    links: tuple[LinkUse, ...]

    @classmethod
    def of(cls, timeline: Timeline, run: RunFacts) -> TiersReport | None:
        """Compute the metrics of the tiers that `run` describes; None if there were no tiers."""
        columns = timeline.tiers
        if columns is None:
            return None
        capacity = float(timeline.worker_blocks.mean())
        duration_ns = timeline.end_ns - timeline.start_ns
        unlimited = name_unlimited_tiers(run)
        return cls(
            onboard_ms=Statistics.of(columns.onboard_ns / NS_PER_MS),
            parked_ms=_summarize_waits(columns.parked_ns),
            room_wait_ms=_summarize_waits(columns.room_wait_ns),
            parked_s=int(columns.parked_ns.sum()) / NS_PER_S,
            room_wait_s=int(columns.room_wait_ns.sum()) / NS_PER_S,
            held_mean=ratio(columns.totals.held_block_ns, duration_ns * capacity * timeline.num_workers),
            held_max=columns.totals.held_max_blocks / capacity,
            counts=TierCounts(
                **{name: getattr(columns.totals, name) for name in TierCounts.__dataclass_fields__}
            ),
            tiers=tuple(
                _compute_tier_use(timeline, columns, summary, unlimited) for summary in columns.tiers
            ),
            links=_compute_link_use(timeline, columns),
        )


def tier_hits(timeline: Timeline, tier: Tier, *, first: bool) -> Int64Column:
    """Return the tokens of each request found on `tier` at its first admission, or at all of them."""
    assert timeline.tiers is not None
    below = timeline.tiers.below_tokens_first if first else timeline.tiers.below_tokens_total
    if tier in BELOW:
        return below[BELOW.index(tier)]
    cached = timeline.cached_tokens_first if first else timeline.cached_tokens_total
    return cached.astype(np.int64) - np.sum(below, axis=0, dtype=np.int64)


def name_unlimited_tiers(run: RunFacts) -> frozenset[str]:
    """Return the names of the run's tiers without a limit, as in `TierUse.tier`."""
    pools = [(pool.name, pool.tiers) for pool in run.pools] or [("", run.tiers)]
    return frozenset(
        _name(pool, tier["tier"])
        for pool, settings in pools
        for tier in settings.get("tiers", ())
        if tier.get("blocks") == "unlimited"
    )


def name_tier_use(summary: TierSummary) -> str:
    """Return the name of a tier, as in `TierUse.tier`."""
    return _name(summary.pool, summary.tier.name)


def _name(pool: str, tier: str) -> str:
    return f"{pool} {tier.lower()}".lstrip()


def _compute_tier_use(
    timeline: Timeline, columns: TierColumns, summary: TierSummary, unlimited: frozenset[str]
) -> TierUse:
    admitted = timeline.first_admit_ns >= 0
    prompt = timeline.prompt_tokens[admitted].astype(np.int64)
    looked_up = timeline.looked_up_tokens[admitted].astype(np.int64)
    workers = columns.workers_of(summary, timeline.num_workers)
    worker = timeline.worker if timeline.handoff is None else timeline.handoff.prompt_worker(timeline.worker)
    in_pool = admitted & (worker >= workers.start) & (worker < workers.stop)
    first = int(tier_hits(timeline, summary.tier, first=True)[in_pool].sum())
    total = int(tier_hits(timeline, summary.tier, first=False)[in_pool].sum())
    name = name_tier_use(summary)
    # The core gives an unlimited tier the blocks that the workload may fill.
    capacity = None if name in unlimited else summary.capacity_blocks
    mean, largest, end = math.nan, math.nan, math.nan
    if capacity is not None:
        mean, largest = _compute_residency(timeline, columns, summary, workers)
        end = summary.resident_blocks / capacity
    return TierUse(
        tier=name,
        hit_tokens_first=first,
        hit_ratio_first=ratio(first, int(prompt.sum())),
        hit_tokens_total=total,
        hit_ratio_total=ratio(total, int(looked_up.sum())),
        capacity_blocks=capacity,
        resident_mean=mean,
        resident_max=largest,
        resident_end=end,
        stored_blocks=summary.stored_blocks,
        evicted_blocks=summary.evicted_blocks,
    )


def _compute_residency(
    timeline: Timeline, columns: TierColumns, summary: TierSummary, workers: range
) -> tuple[float, float]:
    """Return the mean share of the capacity in use, and the largest of any worker (or of a shared tier)."""
    if summary.tier == Tier.G1:
        blocks = timeline.sample_used_blocks + timeline.sample_cached_blocks
    elif summary.tier == Tier.G2:
        blocks = columns.sample_host_blocks
    else:
        function = StepFunction(*summary.residency)
        mean = (
            float(function.means(windows(timeline, 1))[0])
            if timeline.end_ns > timeline.start_ns
            else math.nan
        )
        if not len(function.values):
            return mean, 0.0
        return mean / summary.capacity_blocks, int(function.values.max()) / summary.capacity_blocks
    capacity = summary.capacity_blocks / len(workers)
    (means,) = worker_means(timeline, blocks)
    in_pool = blocks[(timeline.sample_worker >= workers.start) & (timeline.sample_worker < workers.stop)]
    mean = float(means[workers.start : workers.stop].mean())
    return mean / capacity, int(in_pool.max()) / capacity if len(in_pool) else math.nan


def _summarize_waits(times_ns: Int64Column) -> Statistics:
    return Statistics.of(times_ns[times_ns > 0] / NS_PER_MS)


def _compute_link_use(timeline: Timeline, columns: TierColumns) -> tuple[LinkUse, ...]:
    """Group links by kind and pool, the nearest to the GPU first.

    A worker's link is named "worker N KIND", a link of one of several pools "POOL KIND".
    """
    kinds: dict[tuple[str, str], list[LinkUsage]] = {}
    for link in columns.links:
        if "hand-off" in link.name:  # of prefill and decode workers, which have a report of their own
            continue
        owner, _, kind = link.name.rpartition(" ")
        pool = owner if kind.endswith("backend") else columns.pool_of(int(owner.split()[1]))
        kinds.setdefault((kind, pool), []).append(link)
    edges = link_windows(timeline)

    def distance(key: tuple[str, str]) -> tuple[str, bool, str]:
        return max(filter(str.isdigit, key[0])), key[0].endswith("backend"), key[0]

    return tuple(
        summarize_links(f"{pool} {kind}".lstrip(), kinds[kind, pool], edges)
        for kind, pool in sorted(kinds, key=distance)
    )


def link_windows(timeline: Timeline) -> Float64Column:
    """Return the edges of the windows of links, in ns; all are equal in a run without duration."""
    return np.linspace(timeline.start_ns, timeline.end_ns, LINK_WINDOWS + 1)


def summarize_links(name: str, links: Sequence[LinkUsage], edges_ns: Float64Column) -> LinkUse:
    """Summarize links of one kind over the windows between `edges_ns`."""
    moved = np.array([_bytes_per_window(link, edges_ns) for link in links])
    widths_ns = np.diff(edges_ns)
    gbps = links[0].bandwidth_gbps  # equals bytes per nanosecond
    is_limited = math.isfinite(gbps) and edges_ns[-1] > edges_ns[0]
    of_run = moved.sum(axis=1) / (gbps * widths_ns.sum()) if is_limited else np.full(len(links), np.nan)
    over_time = moved.sum(axis=0) / (gbps * widths_ns * len(links)) if is_limited else moved[0] * np.nan
    return LinkUse(
        name=name,
        links=len(links),
        bandwidth_gbps=gbps,
        transfers=sum(link.transfers_finished for link in links),
        bytes=sum(link.bytes_finished for link in links),
        busy_s=sum(link.busy_ns for link in links) / NS_PER_S,
        utilisation_mean=float(of_run.mean()),
        utilisation_max=float(of_run.max()),
        window_s=float(widths_ns[0]) / NS_PER_S,
        window_bytes=moved.sum(axis=0).tolist(),
        window_utilisation=over_time.tolist(),
    )


def _bytes_per_window(link: LinkUsage, edges_ns: Float64Column) -> Float64Column:
    """Return the bytes that a link moved in each window; bytes of a recorded bucket are spread evenly."""
    done = np.concatenate(([0.0], np.cumsum(link.bucket_bytes)))
    knots = np.arange(len(done), dtype=np.float64) * link.bucket_ns
    result: Float64Column = np.diff(np.interp(edges_ns, knots, done))
    return result
