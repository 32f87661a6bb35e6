"""With tiers, too, fast_forward over decode steps changes nothing: no column, no sample, no event, no time of one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tiers.building import EVENT_COLUMNS, shared, tiers
from tiers.fleets import crowd_of, digest, play, random_tiers
from understudy.kv import BUILT_IN_POLICIES

if TYPE_CHECKING:
    from understudy import _core


def told(result: _core.FleetResult, workers: int) -> list[Any]:
    """Every worker's events, each with its time."""
    rows: list[Any] = []
    for worker in range(workers):
        batch, times_ns = result.events(worker).rows()
        rows.append([getattr(batch, name).tolist() for name in EVENT_COLUMNS] + [times_ns.tolist()])
    return rows


def scenario(seed: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A workload, tiers and a fleet, small enough that everything happens."""
    rng = Random(f"leap {seed}")
    through = rng.random() < 0.5
    workload = {
        "requests": rng.choice([20, 40]),
        "groups": rng.choice([2, 4]),
        "burst": rng.choice([1, 3, 8]),
        "most_outputs": rng.choice([12, 60, 200]),
    }
    below = random_tiers(rng, through)
    alone = rng.random() < 0.3
    if alone:
        below["g3"] = shared(rng.choice([10, 100]))
    fleet: dict[str, Any] = {
        "num_gpu_blocks": rng.choice([18, 24, 40]),
        "max_num_seqs": rng.choice([3, 16]),
        "max_num_batched_tokens": rng.choice([8, 64, 2048]),
        "workers": 1 if alone else rng.choice([1, 3]),
        "kv_manager": rng.choice(["native", "native", "kvbm"]),
        "free_order": rng.choice(["all_last", "unkeyed_first"]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "async_scheduling": rng.random() < 0.6,
    }
    # Orders in which a block may go before those that continue it, or before one that is empty.
    if seed % 3 == 0:
        fleet["eviction_policy"] = rng.choice(BUILT_IN_POLICIES)
    return workload, below, fleet


@pytest.mark.parametrize("seed", range(60))
def test_a_fast_forward_yields_the_samples_and_events_of_its_steps(seed: int) -> None:
    workload, below, fleet = scenario(seed)
    crowd = crowd_of(seed, **workload)
    forwarded, stepped = (
        play(crowd, tiers(**below), **fleet, events=True, check=False, fast_forward=fast_forward)
        for fast_forward in (True, False)
    )
    assert digest(forwarded) == digest(stepped)
    assert told(forwarded, fleet["workers"]) == told(stepped, fleet["workers"])
    for column in (name for name in dir(forwarded) if name.startswith("sample_")):
        assert getattr(forwarded, column).tolist() == getattr(stepped, column).tolist(), column
