"""Tiers of a run by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from report.building import MS, Row, timeline
from understudy._core import Tier
from understudy.run.tier_columns import TierColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import LinkUsage, TierSummary, TierTotals
    from understudy.run.timeline import Timeline


def link(name: str, bucket_bytes: list[float], gbps: float = 1.0, transfers: int = 1) -> LinkUsage:
    """A link that moved these bytes in its milliseconds."""
    moved = int(sum(bucket_bytes))
    usage = SimpleNamespace(
        name=name,
        bandwidth_gbps=gbps,
        transfers_started=transfers,
        transfers_finished=transfers,
        bytes_started=moved,
        bytes_finished=moved,
        busy_ns=MS * sum(moved > 0 for moved in bucket_bytes),
        bucket_ns=MS,
        bucket_bytes=np.array(bucket_bytes, np.float64),
    )
    return cast("LinkUsage", usage)


def tier(
    name: Tier,
    capacity: int,
    resident: int = 0,
    stored: int = 0,
    evicted: int = 0,
    residency: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> TierSummary:
    summary = SimpleNamespace(
        tier=name,
        pool="",
        first_worker=0,
        capacity_blocks=capacity,
        resident_blocks=resident,
        stored_blocks=stored,
        evicted_blocks=evicted,
        residency=tuple(np.array(column, dtype=np.int64) for column in residency),
    )
    return cast("TierSummary", summary)


def tiered(**changes: Any) -> Timeline:
    """Two workers of 100 blocks, a host of 400 each, a disk of 1000.

    Three requests of 100 tokens over 100 ms. The first finds nothing, the second 48 tokens on the host and 16 on the
    device, the third 32 on the disk and, after a preemption, 16 on the host.
    """
    totals = SimpleNamespace(
        offloaded_blocks=9,
        dropped_blocks=1,
        onboards=3,
        onboarded_blocks=6,
        joined_loads=2,
        slow_loads=4,
        failed_loads=0,
        room_waits=5,
        deferred_lookups=0,
        refused_stores=0,
        flushed_copies=0,
        held_block_ns=500 * MS,
        held_max_blocks=10,
    )
    columns: dict[str, Any] = {
        "below_tokens_first": ([0, 48, 0], [0, 0, 32], [0, 0, 0]),
        "below_tokens_total": ([0, 48, 16], [0, 0, 32], [0, 0, 0]),
        "parked_ns": [0, 3 * MS, 5 * MS],
        "room_wait_ns": [0, 0, 7 * MS],
        "onboard_ns": [5 * MS, 3 * MS, 1 * MS],
        "sample_held_blocks": [0, 10, 0],
        "sample_host_blocks": [0, 100, 0],
        "tiers": (
            tier(Tier.G1, 200, resident=150, stored=40, evicted=9),
            tier(Tier.G2, 800, resident=200, stored=8, evicted=2),
            tier(Tier.G3, 1000, resident=10, stored=10, residency=([50 * MS, 75 * MS], [20, 10])),
        ),
        "totals": cast("TierTotals", totals),
        "links": (
            link("g2_to_g3_backend", [0.0, 2e6], gbps=2.0, transfers=2),
            link("g3_to_g2_backend", [0.0], gbps=2.0, transfers=0),
            link("worker 0 g1_to_g2", [1e6] * 50, transfers=5),
            link("worker 0 g2_to_g1", [0.0] * 10 + [5e5] * 20),
            link("worker 1 g1_to_g2", [0.0] * 120 + [1e6]),
            link("worker 1 g2_to_g1", []),
            link("worker 0 g2_to_g3", [0.0, 2e6], gbps=float("inf")),
        ),
        **changes,
    }
    return timeline(
        Row([20, 40], prompt_tokens=100),
        Row([60, 80], arrival_ms=10, admit_ms=13, prompt_tokens=100, cached_first=64, worker=1),
        Row(
            [90, 100],
            arrival_ms=50,
            admit_ms=55,
            prompt_tokens=100,
            cached_first=32,
            cached_total=64,
            preemptions=1,
        ),
        num_workers=2,
        sample_time_ns=[0, 50 * MS, 100 * MS],
        sample_worker=[0, 0, 0],
        sample_running=[0, 1, 0],
        sample_waiting=[0, 0, 0],
        sample_used_blocks=[0, 20, 0],
        sample_cached_blocks=[0, 80, 0],
        tiers=TierColumns(**columns),
    )
