"""Metrics of hand-offs between prefill and decode workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.latency import NS_PER_MS, NS_PER_S
from understudy.report.series import StepFunction, covered_ns, worker_means
from understudy.report.statistics import Statistics
from understudy.report.tiers import LINK_WINDOWS, LinkUse, link_windows, summarize_links
from understudy.run.handoff_columns import Way

if TYPE_CHECKING:
    from understudy.report.statistics import Float64Column
    from understudy.run.facts import Settings
    from understudy.run.handoff_columns import HandOffColumns
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import BoolColumn


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of the workers of a role."""

    role: str
    workers: int
    busy_mean: float
    """Share of the duration in which a request ran on a worker, averaged over the workers."""
    busy_max: float
    """The same for the busiest worker."""
    running_mean: float
    """Running requests of a worker, averaged over the duration and the workers."""
    kv_usage_mean: float
    """Share of blocks in use, held ones included."""
    held_mean: float
    """Share of blocks that are kept for decode workers."""
    held_max: float


@dataclass(frozen=True, eq=False, slots=True)
class HandOffLink(LinkUse):
    """Links of hand-offs of one kind, which moved bytes for the share `busy` of the duration (NaN without any)."""

    busy: float
    peak: float
    """Utilisation in the busiest window; NaN for unlimited links, and without duration."""


@dataclass(frozen=True, slots=True)
class HandOffReport:
    """How requests went through prefill and decode workers; `understudy.report.handoff_metrics` defines all numbers."""

    remote: int
    """Requests whose prompt a prefill worker computed and whose blocks arrived."""
    local: int
    """Requests whose prompt the decode worker computed, by the rule."""
    fallback: int
    """Requests whose read failed, and whose prompt the decode worker computed again."""
    failed: int
    """Requests whose read failed, and that ended without being computed."""
    bytes: int
    """KV bytes that were moved."""
    transfer_ms: Statistics
    """From the posting of a read until its last byte."""
    ttft_parts_ms: dict[str, float]
    """Mean parts of the TTFT of remote requests, in order; they add up to it."""
    ttft_ms: float
    """Mean TTFT of remote requests."""
    expired_leases: int
    """Leases of kept blocks that ended before a decode worker read them."""
    late_notifications: int
    """Reads that ended after the lease of their blocks."""
    pools: tuple[PoolUse, ...]
    links: tuple[HandOffLink, ...]
    """Prefill workers' ways out, decode workers' ways in, and the backend if it has a limit."""
    window_s: float
    """Length of a window of the duration."""
    window_held: list[float]
    """Blocks that prefill workers keep for decode workers ÷ their capacity, in each window."""

    @classmethod
    def of(cls, timeline: Timeline, settings: Settings) -> HandOffReport | None:
        """Compute the metrics, given the run's `disaggregation` settings; None for a run without roles."""
        columns = timeline.handoff
        if columns is None:
            return None
        remote = columns.remote
        parts = {
            name: part / NS_PER_MS
            for name, part in columns.ttft_parts_ns(timeline.arrival_ns, timeline.first_token_ns).items()
        }
        means = {name: float(part.mean()) if len(part) else math.nan for name, part in parts.items()}
        prefill = np.zeros(timeline.num_workers, dtype=bool)
        prefill[columns.prefill_workers] = True
        edges = link_windows(timeline)
        held = np.full(LINK_WINDOWS, math.nan)
        if edges[-1] > edges[0]:
            held = StepFunction.fleet(timeline, columns.sample_kept_blocks).means(edges)
        return cls(
            remote=int(remote.sum()),
            local=int((columns.way == Way.LOCAL).sum()),
            fallback=int((columns.way == Way.FALLBACK).sum()),
            failed=int((columns.way == Way.FAILED).sum()),
            bytes=int(columns.bytes.sum()),
            transfer_ms=Statistics.of((columns.landed_ns - columns.posted_ns)[remote] / NS_PER_MS),
            ttft_parts_ms=means,
            ttft_ms=sum(means.values()),
            expired_leases=timeline.expired_leases,
            late_notifications=timeline.late_notifications,
            pools=_describe_pools(timeline, columns, prefill),
            links=_describe_links(columns, settings, edges),
            window_s=float(edges[1] - edges[0]) / NS_PER_S,
            window_held=(held / timeline.worker_blocks[prefill].sum()).tolist(),
        )

    @property
    def largest_part(self) -> str:
        """Name of the part that takes most of the TTFT; empty without remote requests."""
        return max(self.ttft_parts_ms, key=lambda name: self.ttft_parts_ms[name]) if self.remote else ""


def _describe_pools(timeline: Timeline, columns: HandOffColumns, prefill: BoolColumn) -> tuple[PoolUse, ...]:
    held = columns.sample_kept_blocks
    has_running = (timeline.sample_running > 0).astype(np.int64)
    busy, running, used_means, held_means = worker_means(
        timeline, has_running, timeline.sample_running, timeline.sample_used_blocks, held
    )
    uses = []
    for role, mask in (("prefill", prefill), ("decode", ~prefill)):
        blocks = timeline.worker_blocks[mask]
        rows = mask[timeline.sample_worker]
        most = held[rows] / timeline.worker_blocks[timeline.sample_worker[rows]]
        uses.append(
            PoolUse(
                role=role,
                workers=int(mask.sum()),
                busy_mean=float(busy[mask].mean()),
                busy_max=float(busy[mask].max()),
                running_mean=float(running[mask].mean()),
                kv_usage_mean=float((used_means[mask] / blocks).mean()),
                held_mean=float((held_means[mask] / blocks).mean()),
                held_max=float(most.max()) if len(most) else math.nan,
            )
        )
    return tuple(uses)


def _find_busy_ns(columns: HandOffColumns, settings: Settings) -> float:
    """Return the time in which KV moved between any two workers, ns, without the latency of transfers."""
    if columns.pushed_busy_ns >= 0:  # in pieces, with pauses between them, and also for requests that failed
        return float(columns.pushed_busy_ns)
    reads = columns.landed_ns >= 0
    flowing = columns.posted_ns[reads] + round(settings.get("link_latency_ms", 0.0) * NS_PER_MS)
    landed = columns.landed_ns[reads]
    return float(covered_ns(flowing, landed, np.zeros(len(landed), np.int32), 1)[0])


def _describe_links(
    columns: HandOffColumns, settings: Settings, edges: Float64Column
) -> tuple[HandOffLink, ...]:
    ways_out = summarize_links("prefill out", columns.links_out, edges)
    ways_in = summarize_links("decode in", columns.links_in, edges)
    links = [ways_out, ways_in]
    duration_ns = float(edges[-1] - edges[0])
    if (gbps := settings.get("backend_gbps")) is not None:
        # All bytes of the backend leave a prefill worker. In the latency of a transfer none move.
        moved = np.array(ways_out.window_bytes)
        busy_ns = _find_busy_ns(columns, settings)
        of_run = float(moved.sum()) / (gbps * duration_ns) if duration_ns else math.nan
        over_time = moved / (gbps * np.diff(edges)) if duration_ns else np.full(len(moved), math.nan)
        backend = replace(
            ways_out,
            name="backend",
            links=1,
            bandwidth_gbps=float(gbps),
            busy_s=busy_ns / NS_PER_S,
            utilisation_mean=of_run,
            utilisation_max=of_run,
            window_utilisation=over_time.tolist(),
        )
        links.append(backend)
    return tuple(
        HandOffLink(
            **{name: getattr(link, name) for name in LinkUse.__dataclass_fields__},
            busy=link.busy_s * NS_PER_S / (duration_ns * link.links) if duration_ns else math.nan,
            peak=max(link.window_utilisation),
        )
        for link in links
    )
