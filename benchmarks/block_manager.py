"""The block manager against a paged pool in plain Python, and one long prompt through RequestKv.

    python benchmarks/block_manager.py [--blocks 1000000] [--quick] [--cpu-time] [--json [FOLDER]]

One core. A sample is some thousands of blocks, or one prompt; shown are the median sample and the fastest. Sequences
of hashes are made beforehand. Goals are in brackets, and lines below the
table name those that are missed; nothing fails if one is.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.pools import NativePool, PlainPythonPool, Pool, Sequence
from harness.publish import add_json_flag, publish
from harness.timing import Samples, loop_turn_ns, no_garbage_collection, require
from understudy.kv import BlockManager, RequestKv

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.timing import Clock
    from understudy.core_types import PolicyName

SIZES = (1, 16, 512)  # blocks per call
POLICIES: tuple[PolicyName, ...] = ("lru", "lineage", "vllm", "multi_lru")
Rows = dict[str, dict[str, float]]
"""Numbers by row and column of a table. Goals are in results/."""

MAX_SEQUENCES = 100_000  # at n = 1, one long sequence fills the rest of the pool
SAMPLE_BLOCKS = 16_384
SAMPLE_CALLS = 1_024  # short enough that a busy neighbour spoils few of them

PROMPT_TOKENS = 100_000
BLOCK_SIZE = 16
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
PROMPT_POOLS = (40_000,)  # blocks, besides --blocks
# What is shown of the prompt, and the steps that it adds up.
PROMPT_STEPS: dict[str, tuple[str, ...]] = {
    "hash": ("hash",),
    "match: miss": ("match: miss",),
    "match: 6249 hits": ("match: 6249 hits",),
    "schedule: empty pool": ("schedule: empty pool",),
    "schedule: evicting": ("schedule: evicting",),
    "apply": ("apply",),
    "schedule + apply: evicting": ("schedule: evicting", "apply"),
    "hash + match + schedule + apply": ("hash", "match: 6249 hits", "schedule: evicting", "apply"),
    "close": ("close",),
}
# vLLM's own manager with the same prompt, in milliseconds: hash, match, allocate with eviction, free. Recorded
# elsewhere, not run here: Arm Neoverse N1, where a turn of loop_turn_ns takes 56.5 ns.
VLLM_MS = {"hash": 26.0, "match: 6249 hits": 9.8, "schedule + apply: evicting": 20.8, "close": 1.6}
VLLM_MS["hash + match + schedule + apply"] = 26.0 + 9.8 + 20.8
VLLM_TURN_NS = 56.5


# ── The four operations ──


@dataclass(frozen=True)
class Workload(Generic[Sequence]):
    """Two sets of sequences of `size` blocks; with the filler, each set fills the pool exactly."""

    size: int
    old: list[Sequence]
    new: list[Sequence]
    filler: list[Sequence]
    filler_blocks: int

    @property
    def total_blocks(self) -> int:
        return len(self.old) * self.size + self.filler_blocks


def build_workload(pool: Pool[Sequence], num_blocks: int, size: int) -> Workload[Sequence]:
    count = min(num_blocks // size, MAX_SEQUENCES)
    rest = num_blocks - count * size
    rng = np.random.default_rng(size)

    def draw(rows: int, columns: int) -> list[Sequence]:
        return pool.build(rng.integers(1, 2**63, (rows, columns), dtype=np.uint64))

    return Workload(size, draw(count, size), draw(count, size), draw(1, rest) if rest else [], rest)


def batches(sequences: list[Sequence], size: int, rng: random.Random | None = None) -> list[list[Sequence]]:
    """One batch is one sample."""
    calls = min(SAMPLE_CALLS, SAMPLE_BLOCKS // size)
    cut = [sequences[i : i + calls] for i in range(0, len(sequences), calls)]
    if rng is not None:
        rng.shuffle(cut)
    return cut


def sweep(pool: Pool[Sequence], work: Workload[Sequence], samples: Samples, rng: random.Random) -> None:
    """Fill an empty pool, find everything in it, then replace everything; each block once."""
    size = work.size
    if work.filler:
        pool.allocate(work.filler_blocks, 1)
        pool.register(work.filler)
        pool.release()
    for batch in batches(work.old, size):
        blocks = len(batch) * size
        samples.time("allocate", blocks, pool.allocate, size, len(batch))
        samples.time("register", blocks, pool.register, batch)
        samples.time("release", blocks, pool.release)
    for batch in batches(work.old, size, rng):
        blocks = len(batch) * size
        samples.time("match", blocks, pool.match, batch)
        require(pool.held_blocks() == blocks, "every block to match")
        samples.time("release", blocks, pool.release)
    require(pool.cached_blocks() == work.total_blocks, "a pool full of cached blocks")
    for batch in batches(work.new, size):
        samples.time("evict", len(batch) * size, pool.allocate, size, len(batch))
        pool.register(batch)
        pool.release()


def measure(
    pool: Pool[Sequence],
    num_blocks: int,
    size: int,
    sweeps: int,
    clock: Clock,
    free_order: npt.NDArray[np.int64] | None = None,
) -> Samples:
    """All operations with `size` blocks per call, after one sweep to warm up."""
    work = build_workload(pool, num_blocks, size)
    rng = random.Random(size)
    samples = Samples(clock)
    with no_garbage_collection():
        for i in range(sweeps + 1):
            pool.empty(free_order)
            sweep(pool, work, samples if i else Samples(), rng)
    return samples


def operation_rows(group: str, size: int, ours: Samples, peer: Samples | None) -> Rows:
    """M blocks/s. At n = 1 that is M calls/s; allocate and register are a call each."""
    joined = [("allocate",), ("register",)] if size == 1 else [("allocate", "register")]
    rows: Rows = {}
    for parts in [("match",), *joined, ("release",), ("evict",)]:
        rate = 1e-6 / ours.typical(*parts)
        row = rows[f"{group}: {' + '.join(parts)}"] = {"median": rate, "best": 1e-6 / ours.fastest(*parts)}
        if peer is not None:
            beside = 1e-6 / peer.typical(*parts)
            row |= {"plain Python": beside, "ratio": rate / beside}
    return rows


def measure_pools(num_blocks: int, sweeps: int, clock: Clock) -> Rows:
    """Every policy and size, each beside the peer."""
    peers = {size: measure(PlainPythonPool(num_blocks), num_blocks, size, sweeps, clock) for size in SIZES}
    rows: Rows = {}
    for policy in POLICIES:
        pool = NativePool(num_blocks, policy)
        for size in SIZES:
            samples = measure(pool, num_blocks, size, sweeps, clock)
            rows |= operation_rows(f"{policy}, n = {size}", size, samples, peers[size])
        bytes_per_slot = pool.manager.store.memory_bytes / num_blocks
        rows[f"{policy}, memory: bytes per slot"] = {"median": bytes_per_slot}
    # A pool that has served for long hands out blocks from all over its memory.
    order = np.random.default_rng(0).permutation(num_blocks)
    size = SIZES[-1]
    peer = measure(PlainPythonPool(num_blocks), num_blocks, size, sweeps, clock, order)
    samples = measure(NativePool(num_blocks, "lru"), num_blocks, size, sweeps, clock, order)
    rows |= operation_rows(f"lru, n = {size}, scattered", size, samples, peer)
    return rows | operation_rows(f"the peer, n = {size}", size, peers[size], None)


# ── One long prompt ──


def serve(manager: BlockManager, tokens: npt.NDArray[np.uint32], pool: str, samples: Samples) -> None:
    """Prefill a prompt in one step, let it go, and find it again."""
    kv = samples.time("hash", 1, RequestKv, manager, tokens, 1)
    samples.time("match: miss", 1, kv.match_prefix)
    samples.time(f"schedule: {pool}", 1, kv.schedule_prefill, PROMPT_TOKENS)
    samples.time("apply", 1, kv.apply_prefill, 1)
    samples.time("close", 1, kv.close)
    with RequestKv(manager, tokens, 1) as again:
        samples.time("match: 6249 hits", 1, again.match_prefix)
        require(again.cached_tokens == PROMPT_TOKENS - BLOCK_SIZE, "every block but the last to match")


def measure_prompt(num_blocks: int, repeats: int, clock: Clock) -> Rows:
    """A prompt through an empty pool and through one that is full of cached blocks, in milliseconds."""
    rng = np.random.default_rng(0)

    def prompt() -> npt.NDArray[np.uint32]:
        return rng.integers(0, 128_000, PROMPT_TOKENS, dtype=np.uint32)

    empty, full = BlockManager(num_blocks, policy="lru"), BlockManager(num_blocks, policy="lru")
    for _ in range(num_blocks // PROMPT_BLOCKS + 1):
        serve(full, prompt(), "evicting", Samples())
    prompts = [prompt() for _ in range(repeats)]
    samples = Samples(clock)
    with no_garbage_collection():
        for tokens in prompts:
            require(full.metrics().reset_blocks == 0, "a pool full of cached blocks")
            serve(full, tokens, "evicting", samples)
            empty.clear_inactive()
            serve(empty, tokens, "empty pool", samples)

    rows: Rows = {}
    for name, steps in PROMPT_STEPS.items():
        ms = samples.typical(*steps) * 1e3
        row = rows[f"{num_blocks:,} blocks: {name}"] = {"median": ms, "best": samples.fastest(*steps) * 1e3}
        if name in VLLM_MS:
            row |= {"vLLM": VLLM_MS[name], "ratio": VLLM_MS[name] / ms}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The block manager against a paged pool in plain Python.")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="blocks of the pool (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, one sweep: a smoke test")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time of this thread, for a machine that is busy"
    )
    add_json_flag(parser)
    options = parser.parse_args()
    blocks = options.blocks // 10 if options.quick else options.blocks
    if blocks < PROMPT_BLOCKS:
        parser.error(f"--blocks must leave room for a prompt of {PROMPT_BLOCKS} blocks, got {options.blocks}")

    clock = time.thread_time if options.cpu_time else time.perf_counter
    turn_ns = loop_turn_ns(clock)
    print(f"A turn of a Python loop takes {turn_ns:.1f} ns here, {VLLM_TURN_NS} ns where vLLM was recorded.")
    pools = measure_pools(blocks, sweeps=1 if options.quick else 3, clock=clock)
    publish("block_manager", pools, options.json)
    prompts: Rows = {}
    for size in sorted({blocks, *PROMPT_POOLS}, reverse=True):
        prompts |= measure_prompt(size, repeats=5 if options.quick else 50, clock=clock)
    publish("block_manager_prompt", prompts, options.json)


if __name__ == "__main__":
    main()
