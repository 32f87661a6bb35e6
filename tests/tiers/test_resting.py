"""Workers that share tiers rest over steps that concern nobody else, and every result is that of stepping."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tiers.building import EVENT_COLUMNS, INF, shared, tiers
from tiers.fleets import crowd_of, digest, play, random_tiers
from understudy import _core
from understudy.kv import BUILT_IN_POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.workload import Workload

# With steps of one length everything happens at the same few times; with the others nothing does.
TIMINGS: tuple[Callable[[], Any], ...] = (
    lambda: _core.constant_timing(1.0, 1.0),
    lambda: _core.constant_timing(0.5, 0.25),
    _core.polynomial_timing,
)


def scenario(seed: int) -> tuple[Workload, dict[str, Any], dict[str, Any]]:
    """A workload, tiers and a fleet, small enough that everything happens."""
    rng = Random(f"rest {seed}")
    through = rng.random() < 0.5
    crowd = crowd_of(
        seed,
        requests=rng.choice([30, 60]),
        groups=rng.choice([2, 4]),
        burst=rng.choice([1, 3, 8]),
        most_outputs=rng.choice([12, 60, 200]),
    )
    below = random_tiers(rng, through)
    for tier in rng.choice([("g3",), ("g4",), ("g3", "g4")]):
        below[tier] = shared(
            rng.choice([6, 30, 300]),
            worker=rng.choice([0.2, 1.0, INF]),
            backend=rng.choice([0.5, 2.0, INF]),
            offload_concurrency=rng.choice([1, 3]),
        )
    fleet: dict[str, Any] = {
        "num_gpu_blocks": rng.choice([18, 24, 40, 120]),
        "max_num_seqs": rng.choice([3, 16]),
        "max_num_batched_tokens": rng.choice([8, 64, 2048]),
        "workers": rng.choice([2, 3, 5]),
        "kv_manager": rng.choice(["native", "native", "native", "kvbm"]),
        "free_order": rng.choice(["all_last", "unkeyed_first"]),
        "policy": rng.choice(["fcfs", "priority"]),
        "routing": rng.choice(["round_robin", "round_robin", "least_loaded", "random"]),
        "concurrency": rng.choice([0, 0, 5]),
        "events": rng.random() < 0.5,
        "async_scheduling": rng.random() < 0.6,
    }
    # Orders in which a block may go before those that continue it, or before one that is empty.
    if seed % 3 == 0:
        fleet["eviction_policy"] = rng.choice(BUILT_IN_POLICIES)
    return crowd, below, fleet


def everything(result: _core.FleetResult, workers: int, events: bool) -> list[Any]:
    """All that `digest` covers, and events, links and the shared tiers over time."""
    rows: list[Any] = [digest(result), result.itl_ns.tolist(), result.itl_count.tolist()]
    rows.extend([link.name, link.busy_ns, link.bytes_finished] for link in result.links)
    rows.extend([column.tolist() for column in tier.residency] for tier in result.tiers)
    for batch, times_ns in (result.events(worker).rows() for worker in range(workers) if events):
        rows.append([getattr(batch, name).tolist() for name in EVENT_COLUMNS] + [times_ns.tolist()])
    return rows


@pytest.mark.parametrize("seed", range(120))
def test_a_fleet_with_shared_tiers_gives_what_stepping_gives(seed: int) -> None:
    crowd, below, fleet = scenario(seed)
    rested, stepped = (
        play(
            crowd,
            tiers(**below),
            **fleet,
            timing=TIMINGS[seed % len(TIMINGS)](),
            check=False,
            leaping=leaping,
        )
        for leaping in (True, False)
    )
    assert everything(rested, fleet["workers"], fleet["events"]) == everything(
        stepped, fleet["workers"], fleet["events"]
    )


@pytest.mark.parametrize("seed", [32, 84, 95, 116, 150, 154, 1216])
def test_uses_are_counted_before_what_lands_after_them(seed: int) -> None:
    # A block that is named counts as used, and how often that was decides where one stands that lands, or that no copy
    # holds any longer, on a host of several queues.
    crowd, below, fleet = scenario(seed)
    below |= {"g2_policy": "multi_lru", "g2_blocks": (8, 12, 20)[seed % 3]}
    fleet |= {"num_gpu_blocks": 120, "max_num_seqs": (1, 3)[seed % 2], "workers": 2, "kv_manager": "native"}
    fleet |= {"events": False}
    fleet.pop("eviction_policy", None)
    timing = TIMINGS[seed % len(TIMINGS)]
    rested, stepped = (
        play(crowd, tiers(**below), **fleet, timing=timing(), check=False, leaping=leaping)
        for leaping in (True, False)
    )
    assert everything(rested, 2, False) == everything(stepped, 2, False)
