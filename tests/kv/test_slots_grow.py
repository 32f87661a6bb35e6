"""A capacity costs nothing: slots, the index and the order of eviction grow with the blocks that are used."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from model.side_by_side import NATIVE_POLICIES, NativeName, SideBySide
from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 2**29
EXACT = [policy for policy in NATIVE_POLICIES if policy != "multi_lru"]  # its sketch is as large as the pool

UNDER_ASAN = "asan" in os.environ.get("LD_PRELOAD", "")


def run_of(first: int, count: int) -> Identities:
    return Identities.from_local_hashes(np.arange(first, first + count, dtype=np.uint64))


@pytest.mark.parametrize("policy", EXACT)
def test_a_pool_costs_what_is_used_of_it(policy: NativeName) -> None:
    manager = BlockManager(HUGE, policy=policy, events=True)
    assert manager.store.memory_bytes < 1000
    assert manager.metrics().reset_blocks == HUGE
    used = 0
    for count in (1, 300, 5000):
        used += count
        with manager.allocate(count) as blocks:
            blocks.register(run_of(1 + used, count)).release()
        assert 64 * used <= manager.store.memory_bytes <= 260 * used + 40_000
    manager.store.check()


@pytest.mark.parametrize("policy", EXACT)
def test_a_large_pool_that_is_an_eighth_full_costs_no_more_than_its_blocks(policy: NativeName) -> None:
    manager = BlockManager(2_090_000, policy=policy)
    used = 262_145
    held = [manager.allocate(min(1024, used - taken)) for taken in range(0, used, 1024)]
    assert manager.store.memory_bytes <= 260 * used
    for blocks in held:
        blocks.release()


@pytest.mark.parametrize("policy", EXACT)
def test_a_pool_that_is_used_again_and_again_does_not_grow(policy: NativeName) -> None:
    manager = BlockManager(HUGE, policy=policy, reset_on_release=True)
    sizes = set()
    for turn in range(40):
        with manager.allocate(100) as blocks:
            blocks.register(run_of(1 + 100 * turn, 100)).release()
        if turn >= 20 or policy == "vllm":  # who takes fresh blocks first reaches the hundredth
            sizes.add(manager.store.memory_bytes)
    assert max(sizes) < 300 * 4000
    assert policy != "vllm" or max(sizes) < 300 * 400
    manager.store.check()


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_the_order_is_the_same_while_a_pool_grows(policy: NativeName) -> None:
    rng = np.random.default_rng(11)
    chains = [run_of(1 + 1000 * i, 90) for i in range(24)]
    both = SideBySide(1100, policy, "keep", chains)
    for turn in range(40):
        which = int(rng.integers(0, len(chains)))
        length = int(rng.integers(1, 90))
        both.allocate(length)
        if rng.random() < 0.8:
            both.register_direct(0, both.prefix(which, length))
        else:
            both.release_mutable(0)
        both.match_prefix(both.prefix(int(rng.integers(0, len(chains))), 40))
        while len(both.registered) > 6:
            both.release(int(rng.integers(0, 6)), tail_first=bool(rng.integers(0, 2)))
        if turn % 10 == 9:
            both.compare()
            both.store.check()
    both.close()


TRACE = """
{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}
{"timestamp": 10, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}
"""
IMPORTS = """
import resource, sys
from pathlib import Path
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import read_trace
two = read_trace(Path(sys.argv[1]))
run_offline(RunPlan(two, VllmConfig(num_gpu_blocks=64)))
"""


def peak_kb(trace: Path, code: str) -> int:
    """Of a process of its own."""
    say = "\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    made = subprocess.run(
        [sys.executable, "-c", IMPORTS + code + say, str(trace)], check=True, capture_output=True, text=True
    )
    return int(made.stdout.splitlines()[-1])


@pytest.mark.skipif(UNDER_ASAN, reason="AddressSanitizer keeps what was freed")
def test_a_capacity_that_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE.lstrip(), encoding="utf-8")
    small = peak_kb(trace, "")
    for run in (
        "run_offline(RunPlan(two, VllmConfig(num_gpu_blocks=500_000_000)))",
        "run_offline(RunPlan(two, VllmConfig(num_gpu_blocks=500_000_000, eviction_policy='lineage')))",
        "run_offline(RunPlan(two, VllmConfig(num_gpu_blocks=65_536), workers=2000, routing='least_loaded'))",
        "run_offline(RunPlan(two, VllmConfig(), tiers=TiersConfig.from_dict("
        "{'kv_bytes_per_token': 131072, 'tiers': [{'tier': 'g2', 'bytes': '1000TB'}]})))",
    ):
        assert peak_kb(trace, run) - small < 64 * 1024, run
