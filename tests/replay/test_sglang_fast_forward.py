"""Fast-forward of SGLang's plain decode equals stepping, and its cache takes memory by runs, not by tokens."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from replay.building import ONE_MS
from understudy._core import SglangIterations
from understudy.conformance.sglang_recording import SglangScenarioConfig
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Polynomial
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Workload

FIRST = int(os.environ.get("SGLANG_FAST_FORWARD_FIRST", "0"))
SEEDS = int(os.environ.get("SGLANG_FAST_FORWARD_COUNT", "600"))
"""Random configurations, from seed `FIRST`."""


def random_run(seed: int) -> tuple[Workload, SglangConfig, dict[str, Any]]:
    """Shared prefixes, long outputs, early ends, small pools, random settings and drivers."""
    rng = Random(f"sglang fast-forward {seed}")
    page = rng.choice([1, 1, 4, 16])
    rows = rng.randint(3, 25)
    lengths = [rng.randint(1, 6 * page + 20) for _ in range(rows)]
    limits = [rng.choice([1, 2, 3, rng.randint(4, 200)]) for _ in range(rows)]
    ends = [limit if rng.random() < 0.6 else rng.randint(1, limit) for limit in limits]
    ids = [rng.choice([100, 5000]) * 1000 + position for length in lengths for position in range(length)]
    workload = Workload(
        arrival_ns=np.cumsum([0] + [rng.choice([0, 1, 30_000_000, 700_000_000]) for _ in range(rows - 1)]),
        prompt_tokens=np.array(lengths, np.int32),
        output_tokens=np.array(ends, np.int32),
        max_tokens=np.array(limits, np.int32),
        hash_offsets=np.cumsum([0, *lengths]),
        hash_ids=np.array(ids, np.uint32),
        trace_block_size=1,
        priority=np.array([rng.randint(-20, 20) for _ in range(rows)], np.int32),
    )
    least = (max(lengths) + max(limits)) // page + 12
    policy: Any = rng.choice(["fcfs", "lpm", "dfs-weight", "lof"])
    eviction: Any = rng.choice(["lru", "lfu", "filo"])
    engine = SglangConfig(
        block_size=page,
        num_gpu_blocks=least * rng.choice([1, 2, 20]),
        max_num_seqs=rng.choice([2, 8, None]),
        chunked_prefill_size=rng.choice([-1, 4 * page, 8192]),
        schedule_policy=policy,
        schedule_conservativeness=rng.choice([0.3, 1.0]),
        enable_mixed_chunk=rng.random() < 0.3,
        disable_radix_cache=rng.random() < 0.2,
        disable_overlap_schedule=rng.random() < 0.5,
        radix_eviction_policy=eviction,
        enable_priority_scheduling=policy in ("fcfs", "lof") and rng.random() < 0.4,
        timing=ONE_MS if rng.random() < 0.5 else Polynomial(),
    )
    how: dict[str, Any] = {"workers": rng.choice([1, 3])}
    how |= rng.choice([{}, {"routing": "least_loaded"}, {"routing": KvRouting()}, {"load": ClosedLoop(3)}])
    if rng.random() < 0.3 and not engine.disable_radix_cache:
        tiers = {"kv_bytes_per_token": 1024, "tiers": [{"tier": "g2", "blocks": least}]}
        how["tiers"] = TiersConfig.from_dict(tiers)
    return workload, engine, how


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, 50))
def test_fast_forward_equals_stepping(first: int) -> None:
    for seed in range(first, min(first + 50, FIRST + SEEDS)):
        workload, engine, how = random_run(seed)
        fast = run_offline(RunPlan(workload, engine, **how))
        stepped = run_offline(RunPlan(workload, engine, fast_forward=False, **how))
        assert fast.facts.digest == stepped.facts.digest, seed


def test_deep_checks_compare_states_of_fast_forwards() -> None:
    compared = 0
    for seed in range(40):
        workload, engine, how = random_run(seed)
        run = run_offline(RunPlan(workload, engine, check="deep", **how))
        note = run.notes[-1]
        compared += 0 if "no step" in note else int(note.split()[2].replace(",", ""))
    assert compared > 100


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_million_cached_tokens_take_memory_by_runs() -> None:
    config = SglangScenarioConfig(
        max_total_num_tokens=2**20 + 2**16, chunked_prefill_size=-1, max_prefill_tokens=2**17
    )
    loop = SglangIterations(config.settings())
    before = resident_bytes()
    for request in range(128):
        shared = [(1000 * block, 512) for block in range(4)]
        own = [(10**9 + 10**6 * request + 1000 * block, 512) for block in range(16)]
        loop.submit(request, shared + own, 1, 2**40 + request * 2**20)
        while loop.schedule() is not None:
            loop.process()
            loop.take_events()
            loop.take_log()
    assert loop.state["evictable"] == 128 * 16 * 512 + 4 * 512
    # One node and 16 runs for each request; what they share is one node.
    assert loop.state["nodes"] <= 130
    assert loop.cached_runs <= 128 * 16 + 4
    assert resident_bytes() - before < 200e6
