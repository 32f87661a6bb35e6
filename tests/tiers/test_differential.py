"""Tiers against runs whose results are known: without tiers, with an unlimited device, and the same run otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiers.building import INF, Only, chain, forked, shared, tiers, way
from tiers.fleets import crowd_of, digest, drained, per_request, play
from understudy import _core

SEEDS = range(12)


def calm(seed: int, requests: int = 60) -> dict[str, Any]:
    """A workload and an engine without preemptions: two requests at a time, and room for the largest two.

    Whole prompts are scheduled at once and outputs belong to nobody else, so that what a request finds depends on who
    came before it only, not on how far they are.
    """
    return {"workload": crowd_of(seed, requests, most_outputs=4), "num_gpu_blocks": 22, "max_num_seqs": 2}


def hits(result: _core.FleetResult) -> int:
    assert result.preemptions.sum() == 0
    return int(result.cached_tokens_first.sum())


# --- against an unlimited device ------------------------------------------------------------------------


@pytest.mark.parametrize("write_through", [False, True], ids=["on eviction", "write-through"])
@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
def test_an_unlimited_host_at_no_cost_is_as_good_as_an_unlimited_device(
    write_through: bool, exclusive: bool
) -> None:
    """Nothing is ever forgotten then. Constant timing: a hit changes no step's duration, so nobody's order either."""
    config = tiers(g2_blocks=4000, gbps=INF, write_through=write_through, exclusive=exclusive)
    gained = 0
    for seed in SEEDS:
        setting = calm(seed)
        small = play(config=config, **setting)
        large = play(config=None, **{**setting, "num_gpu_blocks": 4000})
        bare = play(config=None, **setting)
        assert small.cached_tokens_first.tolist() == large.cached_tokens_first.tolist(), seed
        assert hits(small) == hits(large)
        assert hits(small) >= hits(bare)
        gained += hits(small) - hits(bare)
        assert small.parked_ns.sum() == 0
        assert small.room_wait_ns.sum() == 0
        drained(small)
    assert gained > 0


def test_more_host_never_lowers_the_hits() -> None:
    """Without cost, preemption or other workers, and by least recent use on the host."""
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]
    for seed in SEEDS:
        found = [hits(play(config=tiers(g2_blocks=size, gbps=INF), **calm(seed, 80))) for size in sizes]
        assert found == sorted(found), (seed, found)
        assert found[-1] > found[0]


# --- against no tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("write_through", [False, True], ids=["on eviction", "write-through"])
@pytest.mark.parametrize(
    "nothing", [{"min_reuse": 2**32 - 1}, {"offload_filter": Only()}], ids=["never reused enough", "policy"]
)
@pytest.mark.parametrize("workers", [1, 3])
def test_where_nothing_qualifies_the_run_is_that_without_tiers(
    write_through: bool, nothing: dict[str, Any], workers: int
) -> None:
    config = tiers(write_through=write_through, g3=shared(), **nothing)
    for seed in SEEDS:
        crowd = crowd_of(seed, 50, burst=2)
        for engine in ({}, {"async_scheduling": True}, {"num_gpu_blocks": 12}):
            with_tiers = play(crowd, config, workers=workers, **engine)
            without = play(crowd, None, workers=workers, **engine)
            assert per_request(with_tiers, tiers=False) == per_request(without)
            assert with_tiers.steps == without.steps
            assert with_tiers.tier_totals.offloaded_blocks == 0


def test_where_nothing_qualifies_the_device_tells_what_it_tells_without_tiers() -> None:
    told = []
    for config in (tiers(offload_filter=Only()), None):
        engine = _core.VllmEngine(
            _core.VllmEngineConfig(block_size=4, num_gpu_blocks=12, events=True),
            _core.constant_timing(1.0, 1.0),
            tiers=config,
        )
        for number in range(30):
            blocks = forked(number % 3, number % 4, number) if number % 2 else chain(number % 5)
            engine.submit(f"r{number}", 4 + number % 13, 1 + number % 7, blocks)
        engine.advance(10**12)
        batch = engine.take_all_events()
        told.append((batch.kinds.tolist(), batch.tiers.tolist(), batch.sequence_hashes.tolist()))
    assert told[0] == told[1]
    assert set(told[0][0]) == {0, 1}


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_loads_that_take_longer_than_computing_are_computed_and_nobody_waits(disk: bool) -> None:
    """Written through at no cost, so that what is left of the tiers is the question whether to load."""
    below: dict[str, Any] = {"g3": shared(worker=INF)} if disk else {}
    config = tiers(host=way(INF, 1e-6), write_through=True, recompute_fallback=True, **below)
    for seed in SEEDS:
        crowd = crowd_of(seed, 50, burst=2)
        timing = _core.polynomial_timing()
        with_tiers = play(crowd, config, workers=2, timing=timing)
        without = play(crowd, None, workers=2, timing=timing)
        totals = with_tiers.tier_totals
        assert totals.slow_loads > 0
        assert (totals.onboards, totals.joined_loads) == (0, 0)
        assert with_tiers.parked_ns.sum() == 0
        assert with_tiers.room_wait_ns.sum() == 0
        assert per_request(with_tiers, tiers=False) == per_request(without)


def test_a_cap_over_both_directions_counts_when_loading_is_weighed() -> None:
    onboards = []
    for duplex_gbps in (0.05, INF):
        config = tiers(
            host=way(INF, duplex_gbps=duplex_gbps), write_through=True, recompute_fallback=True, g2_blocks=400
        )
        result = play(crowd_of(1, 50, burst=2), config, timing=_core.polynomial_timing())
        onboards.append(result.tier_totals.onboards)
    assert onboards[0] == 0 < onboards[1]


# --- against itself --------------------------------------------------------------------------------------


def settings(seed: int) -> tuple[_core.TierConfig, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    slow = float(rng.choice([0.2, 1.0, 5.0, INF]))
    config = tiers(
        g2_blocks=int(rng.choice([4, 20, 100])),
        host=way(slow, slow * 2, down_fixed_ns=int(rng.choice([0, 50_000]))),
        write_through=bool(rng.integers(2)),
        offload_batch_size=int(rng.choice([1, 2, 32])),
        offload_concurrency=[None, 1][int(rng.integers(2))],
        recompute_fallback=bool(rng.integers(2)),
        onboard_failure_rate=float(rng.choice([0.0, 0.3])),
    )
    return config, {
        "workers": int(rng.choice([1, 2, 3])),
        "num_gpu_blocks": int(rng.choice([10, 16, 24])),
        "max_num_seqs": int(rng.choice([2, 8])),
        "max_num_batched_tokens": int(rng.choice([16, 8192])),
    }


@pytest.mark.parametrize("seed", range(25))
def test_fast_forwards_threads_and_the_way_of_playing_change_nothing(seed: int) -> None:
    config, how = settings(seed)
    crowd = crowd_of(seed, 60, burst=2)
    plain = play(crowd, config, **how)
    drained(plain)
    for other in ({"fast_forward": True, "check": False}, {"threads": 2}, {"threads": 2, "check": False}):
        assert digest(play(crowd, config, **how, **other)) == digest(plain)
    if how["workers"] == 1:  # as part of a fleet, worker by worker in time
        assert digest(play(crowd, config, **how, routing="least_loaded")) == digest(plain)
