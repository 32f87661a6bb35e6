"""Workers that share tiers rest over steps that concern nobody else, and every result is that of stepping."""

from __future__ import annotations

from itertools import accumulate, chain
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import sessions
from tiers.building import EVENT_COLUMNS, INF, shared, tiers
from tiers.fleets import crowd_of, digest, play, random_tiers
from understudy import _core
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.kv import BUILT_IN_POLICIES
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

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
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
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
            fast_forward=fast_forward,
        )
        for fast_forward in (True, False)
    )
    assert everything(rested, fleet["workers"], fleet["events"]) == everything(
        stepped, fleet["workers"], fleet["events"]
    )


@pytest.mark.parametrize("seed", [49, 66, 88, 140, 165, 265])
def test_what_a_rest_took_its_steps_for_is_forgotten_once_somebody_comes_or_goes(seed: int) -> None:
    crowd, below, fleet = scenario(seed)
    size = (3, 5)[seed % 2]
    fleet |= {"block_size": size, "max_model_len": fleet["num_gpu_blocks"] * size}
    fleet |= {"async_scheduling": False, "events": False}
    rested, stepped = (
        play(
            crowd,
            tiers(**below),
            **fleet,
            timing=_core.polynomial_timing(),
            check=False,
            fast_forward=fast_forward,
        )
        for fast_forward in (True, False)
    )
    assert everything(rested, fleet["workers"], False) == everything(stepped, fleet["workers"], False)


def same_texts(seed: int) -> Workload:
    """Conversations that quote one of a few texts: what somebody decodes is in the prompts of others."""
    rng = Random(f"texts {seed}")
    texts, most_outputs, now_ms = rng.randrange(1, 4), rng.choice([8, 20, 60]), 0
    turns, arrivals = [], []
    for _ in range(rng.choice([12, 24])):
        now_ms += rng.randrange(10)
        arrivals.append(now_ms)
        prompt, rows = rng.randrange(1, 20), []
        for turn in range(rng.choice([1, 1, 2, 3])):
            outputs = rng.randrange(1, most_outputs + 1)
            rows.append((prompt, outputs, rng.randrange(4) if turn else 0))
            prompt += outputs + rng.randrange(1, 6)
        turns.append(rows)
    said = [rng.randrange(texts) for _ in turns]
    return sessions(*turns, arrival_ms=arrivals, trace_block_size=1, quoted=True, texts=said)


@pytest.mark.parametrize("seed", [452, 4385, 5948, 7505, 7860, 9644, 10280, 19553])
def test_no_rest_goes_over_the_step_that_fills_what_the_head_of_a_queue_waits_for(seed: int) -> None:
    crowd = same_texts(seed)
    _, below, fleet = scenario(seed)
    longest = int((crowd.prompt_tokens + crowd.output_tokens).max())
    fleet |= {
        "num_gpu_blocks": longest // 4 + (2, 5, 12, 22)[seed % 4],
        "max_num_seqs": 16,
        "scheduling_policy": "fcfs",
    }
    fleet |= {"kv_manager": "native", "async_scheduling": False}
    timing = TIMINGS[seed % len(TIMINGS)]
    rested, stepped = (
        play(crowd, tiers(**below), **fleet, timing=timing(), check=False, fast_forward=fast_forward)
        for fast_forward in (True, False)
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
        play(crowd, tiers(**below), **fleet, timing=timing(), check=False, fast_forward=fast_forward)
        for fast_forward in (True, False)
    )
    assert everything(rested, 2, False) == everything(stepped, 2, False)


# Arrival in ms, prompt and output of each request; all prompts begin alike.
CROWD = (
    (133, 131, 13), (133, 311, 42), (133, 119, 83), (133, 64, 80), (194, 297, 94), (210, 227, 17), (210, 96, 62),
    (210, 299, 119), (224, 260, 27), (224, 338, 90), (224, 116, 18), (224, 42, 69), (224, 83, 29), (224, 348, 29),
    (224, 190, 33), (322, 167, 96), (322, 7, 94), (322, 126, 54), (322, 10, 44), (341, 164, 56), (482, 313, 75),
    (531, 222, 37), (531, 3, 53), (531, 204, 36), (567, 384, 93), (589, 221, 22), (690, 67, 43), (754, 296, 82),
    (842, 234, 42), (842, 90, 74), (842, 164, 71), (850, 45, 22), (879, 282, 83), (974, 116, 74), (1034, 223, 92),
    (1034, 168, 80), (1034, 360, 96), (1261, 310, 57), (1316, 39, 39), (1316, 334, 116),
)  # fmt: skip


def test_the_head_of_a_queue_that_lacks_room_goes_on_when_one_of_its_hits_is_evicted_and_has_a_twin() -> None:
    # It needs less room then, which no landing told.
    alike = (1, 0, 0, 0, 2, 0)  # of 64 tokens each
    prompts = [alike[: -(-prompt // 64)] for _, prompt, _ in CROWD]
    rows = np.array(CROWD, dtype=np.int64)
    crowd = Workload(
        arrival_ns=rows[:, 0] * 1_000_000,
        prompt_tokens=rows[:, 1].astype(np.uint32),
        output_tokens=rows[:, 2].astype(np.uint32),
        hash_offsets=np.array([0, *accumulate(len(prompt) for prompt in prompts)], dtype=np.int64),
        hash_ids=np.array(list(chain.from_iterable(prompts)), dtype=np.uint32),
        trace_block_size=64,
    )
    engine = VllmConfig(
        block_size=5,
        num_gpu_blocks=96,
        max_num_batched_tokens=200,
        long_prefill_token_threshold=5,
        scheduler_reserve_full_isl=True,
        async_scheduling=False,
        vllm_version="v0.23",
        timing=Polynomial(),
        mocker=MockerSettings(speedup_ratio=7.0),
    )
    host = {"down_gbps": 0.002, "up_gbps": 0.02, "fixed_us": 2500, "offload_concurrency": 2}
    disk = {
        "down_gbps": 0.02,
        "up_gbps": 0.5,
        "fixed_us": 300,
        "offload_concurrency": 1,
        "backend_down_gbps": 0.5,
    }
    below = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 16384,
            "tiers": [
                {"tier": "g2", "blocks": 40, "link": host},
                {"tier": "g3", "blocks": 40, "link": disk, "latency_ms": 1.5},
            ],
            "offload": {
                "mode": "write_through",
                "offload_batch_size": 4,
                "demand_first": True,
                "recompute_fallback": False,
            },
        }
    )
    rested, stepped = (
        run_offline(
            RunPlan(
                crowd, engine, tiers=below, workers=2, routing="random", seed=0, fast_forward=fast_forward
            )
        )
        for fast_forward in (True, False)
    )
    assert rested.facts.digest == stepped.facts.digest
