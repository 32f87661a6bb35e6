"""Workers that meet: each runs ahead as far as nothing can reach it, and every result is that of stepping."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from model.replay_gen import COLUMNS, random_case
from replay.building import ONE_MS, crowd, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, OpenLoop, Poisson

WAYS: tuple[dict[str, Any], ...] = (
    {"routing": "least_loaded"},
    {"routing": "least_loaded", "load": ClosedLoop(3)},
    {"routing": "random", "load": ClosedLoop(7)},
    {"routing": "round_robin", "load": OpenLoop()},
)


def outcome(case: Any, how: dict[str, Any]) -> Any:
    """Every column of the run, or what it failed with."""
    try:
        run = run_offline(RunPlan(case.workload, case.config, **how))
    except WrongState as stuck:
        return type(stuck)
    timeline = run.timeline
    columns = {name: getattr(timeline, name).tolist() for name in COLUMNS}
    return columns, timeline.steps, timeline.evictions, timeline.stored_blocks, run.facts.digest


@pytest.mark.parametrize("seed", range(200, 320))
def test_a_fleet_that_meets_gives_what_stepping_gives(seed: int) -> None:
    case = random_case(seed)
    how = {**case.how, "workers": 2 + seed % 4, **WAYS[seed % len(WAYS)]}
    assert outcome(case, how) == outcome(case, {**how, "fast_forward": False})


@pytest.mark.parametrize("seed", range(400, 440))
def test_so_does_a_fleet_with_hosts_of_its_own(seed: int) -> None:
    case = random_case(seed, enable_prefix_caching=True)
    tiers = msgspec.convert(
        {
            "kv_bytes_per_token": 1 << 14,
            "tiers": [
                {
                    "tier": "g2",
                    "blocks": 8 + 3 * (seed % 17),
                    "link": {"down_gbps": 0.1 * (1 + seed % 5), "up_gbps": 0.3},
                }
            ],
            "offload": {"mode": ("evict", "write_through")[seed % 2]},
        },
        TiersConfig,
    )
    how = {**case.how, "workers": 2 + seed % 3, **WAYS[seed % len(WAYS)], "tiers": tiers}
    assert outcome(case, how) == outcome(case, {**how, "fast_forward": False})


@pytest.mark.parametrize("how", WAYS)
def test_a_timing_model_that_nobody_can_foresee_changes_nothing(how: dict[str, Any]) -> None:
    class Falling:
        """Steps get shorter as they get fuller."""

        def prefill_ms(self, *_: int) -> float:
            return 3.0

        def decode_ms(self, requests: int, *_: int) -> float:
            return 10.0 / (1 + requests)

    config = VllmConfig(block_size=16, num_gpu_blocks=300, timing=ONE_MS)
    digests = {
        run_offline(
            RunPlan(crowd(60), config, workers=3, timing=Falling(), fast_forward=fast_forward, **how)
        ).facts.digest
        for fast_forward in (True, False)
    }
    assert len(digests) == 1


def test_a_finish_and_an_arrival_at_one_time_come_in_this_order() -> None:
    # Worker 0 ends its request at 3 ms, when the third arrives: it is the least loaded by then.
    workload = single_turns([10, 10, 10], [3, 9, 1], arrival_ms=[0, 0, 3])
    run = run_offline(RunPlan(workload, VllmConfig(timing=ONE_MS), workers=2, routing="least_loaded"))
    assert run.timeline.finish_ns.tolist()[0] == run.timeline.arrival_ns.tolist()[2]
    assert run.timeline.worker.tolist() == [0, 1, 0]


@pytest.mark.parametrize("routing", ["least_loaded", "kv"])
def test_queues_longer_than_the_pool_has_blocks_change_nothing(routing: Any) -> None:
    load = crowd(120, arrivals=Poisson(qps=4000))
    engine = VllmConfig(block_size=16, num_gpu_blocks=60, max_num_seqs=8, async_scheduling=False)
    runs = [
        run_offline(RunPlan(load, engine, workers=2, routing=routing, fast_forward=fast))
        for fast in (True, False)
    ]
    assert runs[0].timeline.sample_waiting.max() > 30
    assert runs[0].facts.digest == runs[1].facts.digest
