"""Metrics of hand-offs between prefill and decode workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.latency import NS_PER_MS
from understudy.report.series import worker_means
from understudy.report.statistics import Statistics
from understudy.run.handoff_columns import Way

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Use of the workers of a role."""

    role: str
    workers: int
    kv_usage_mean: float
    """Share of blocks in use, held ones included."""
    held_mean: float
    """Share of blocks that are kept for decode workers."""
    held_max: float


@dataclass(frozen=True, slots=True)
class HandOffReport:
    """How requests went through prefill and decode workers."""

    remote: int
    """Requests whose prompt a prefill worker computed."""
    local: int
    """Requests whose prompt the decode worker computed, by the rule."""
    bytes: int
    """KV bytes that were moved."""
    transfer_ms: Statistics
    """From the posting of a read until its last byte."""
    ttft_parts_ms: dict[str, float]
    """Mean parts of the TTFT of remote requests, in order; they add up to it."""
    ttft_ms: float
    """Mean TTFT of remote requests."""
    pools: tuple[PoolUse, ...]

    @classmethod
    def of(cls, timeline: Timeline) -> HandOffReport | None:
        """Compute the metrics; None for a run without roles."""
        columns = timeline.handoff
        if columns is None:
            return None
        remote = columns.remote
        parts = {name: part / NS_PER_MS for name, part in columns.ttft_parts_ns(timeline).items()}
        means = {name: float(part.mean()) if len(part) else math.nan for name, part in parts.items()}
        return cls(
            remote=int(remote.sum()),
            local=int((columns.way == Way.LOCAL).sum()),
            bytes=int(columns.bytes[remote].sum()),
            transfer_ms=Statistics.of((columns.landed_ns - columns.posted_ns)[remote] / NS_PER_MS),
            ttft_parts_ms=means,
            ttft_ms=sum(means.values()),
            pools=_describe_pools(timeline),
        )

    @property
    def largest_part(self) -> str:
        """Name of the part that takes most of the TTFT; empty without remote requests."""
        return max(self.ttft_parts_ms, key=lambda name: self.ttft_parts_ms[name]) if self.remote else ""


def _describe_pools(timeline: Timeline) -> tuple[PoolUse, ...]:
    columns = timeline.handoff
    assert columns is not None
    prefill = np.zeros(timeline.num_workers, dtype=bool)
    prefill[columns.prefill_worker[columns.prefill_worker >= 0]] = True
    prefill[: int(np.flatnonzero(prefill).max(initial=-1)) + 1] = True
    held = columns.sample_kept_blocks
    used_means, held_means = worker_means(timeline, timeline.sample_used_blocks, held)
    uses = []
    for role, mask in (("prefill", prefill), ("decode", ~prefill)):
        if not mask.any():
            continue
        blocks = timeline.worker_blocks[mask]
        rows = mask[timeline.sample_worker]
        most = held[rows] / timeline.worker_blocks[timeline.sample_worker[rows]]
        uses.append(
            PoolUse(
                role=role,
                workers=int(mask.sum()),
                kv_usage_mean=float((used_means[mask] / blocks).mean()),
                held_mean=float((held_means[mask] / blocks).mean()),
                held_max=float(most.max()) if len(most) else math.nan,
            )
        )
    return tuple(uses)
