"""Check cache curves against the anchors of kvcache-simulator 0.1.3, and measure their cost.

python benchmarks/cache_curves.py [--trace mooncake_conversation.jsonl] [--visits 100000000] [--json [FOLDER]]
"""

from __future__ import annotations

import argparse
import resource
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.publish import add_json_flag, publish
from understudy import read_trace
from understudy._core import BlockVisits
from understudy.cache.curves import CacheCurves
from understudy.workload import Workload
from understudy.workload.reuse import hit_curve

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = (22, 88, 352, 1_409, 2_818, 5_637, 11_275, 22_550, 45_100, 90_200)
ANCHORS = {
    "lru": "0.045353 0.045359 0.045400 0.048897 0.064228 0.131468 0.233364 0.316591 0.374381 0.390936",
    "insertion": "0.0250 0.0370 0.0429 0.0481 0.0622 0.1222 0.1956 0.2778 0.3361 0.3735",
    "optimal": "0.0531 0.0708 0.1182 0.2299 0.3028 0.3728 0.3981 0.3981 0.3981 0.3981",
}
"""Mooncake's conversation trace, blocks of 512 tokens, hits of the last half of its requests."""
CEILING = "0.398113"
WHOLE_TRACE = "0.373624"
POLICIES = {
    "insertion": "FIFO",
    "optimal": "optimal",
    "optimal_pinned": "optimal with pinned blocks",
    "multi_lru": "multi_lru",
    "lineage": "lineage",
}
Rows = dict[str, dict[str, float]]
"""Numbers by row and column of the table."""


def check_anchors(workload: Workload) -> dict[str, float]:
    """Compare all sizes and policies with the anchors; exit with the differences if there are any."""
    curves = CacheCurves(workload, 512, prompts_only=True, warm_up=0.5)
    wrong = []
    for policy, line in ANCHORS.items():
        for blocks, anchor, ratio in zip(BLOCKS, line.split(), curves.hit_ratio(policy, BLOCKS), strict=True):
            if f"{ratio:.{len(anchor) - 2}f}" != anchor:
                wrong.append(f"{policy} with {blocks} blocks: {ratio:.6f}, anchor {anchor}")
    whole = CacheCurves(workload, 512, prompts_only=True).unlimited_hit_ratio
    for name, ratio, anchor in (
        ("ceiling", curves.unlimited_hit_ratio, CEILING),
        ("whole", whole, WHOLE_TRACE),
    ):
        if f"{ratio:.6f}" != anchor:
            wrong.append(f"{name}: {ratio:.6f}, anchor {anchor}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"all anchors match ({curves.prompt_tokens:,} prompt tokens)")
    anchors = 3 * len(BLOCKS) + 2
    return {"equal": anchors, "of": anchors}


def measure(call: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def measure_trace(workload: Workload) -> Rows:
    """Return the cost of the curve at three block sizes, and of each policy at 16 tokens."""
    rows: Rows = {}
    for block_size in (512, 64, 16):
        curve = partial(hit_curve, workload, block_size)
        rows[f"LRU, every size, blocks of {block_size}"] = {"time": measure(curve)}
    curves = CacheCurves(workload, 16)
    print(f"{curves.visits.visits:,} block visits, {curves.visits.distinct:,} distinct blocks")
    for policy, name in POLICIES.items():
        ratio = partial(curves.hit_ratio, policy, [curves.visits.distinct // 8])
        rows[f"{name}, one size, blocks of 16"] = {"time": measure(ratio)}
    return rows


def measure_visits(visits: int) -> Rows:
    """Return the cost of a synthetic workload with this many block visits: half of each prompt is shared."""
    rng = np.random.default_rng(1)
    per_row = 1_000
    rows = visits // per_row
    ids = np.arange(rows * per_row, dtype=np.uint32).reshape(rows, per_row)
    shared = rng.integers(0, rows, rows)
    ids[:, : per_row // 2] = ids[np.minimum(shared, np.arange(rows)), : per_row // 2]
    workload = Workload(
        arrival_ns=np.arange(rows),
        prompt_tokens=np.full(rows, 16 * per_row + 1),
        output_tokens=np.ones(rows, np.int32),
        hash_offsets=np.arange(rows + 1) * (per_row + 1),
        hash_ids=np.column_stack([ids, np.zeros(rows, np.uint32)]).ravel(),
        trace_block_size=16,
    )
    del ids
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    numbered = BlockVisits(workload, 16)
    curve, distinct = numbered.lru(np.arange(rows, dtype=np.int64))
    seconds = time.process_time() - begin
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{numbered.visits:,} block visits, {distinct:,} distinct, {len(curve):,} sizes")
    print(f"{most / 2**20:.2f} GiB at most, {before / 2**20:.2f} of them the workload")
    name = f"LRU, every size, {visits:,} visits"
    return {name: {"time": seconds, "memory with the workload": most / 2**20}}


def main() -> None:
    """Run the requested measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--visits", type=int, help="block visits of a synthetic workload")
    add_json_flag(parser)
    args = parser.parse_args()
    rows: Rows = {}
    if args.trace is not None:
        workload = read_trace(args.trace)
        publish("cache_anchors", {"all": check_anchors(workload)}, args.json)
        rows |= measure_trace(workload)
    if args.visits is not None:
        rows |= measure_visits(args.visits)
    publish("cache_curves", rows, args.json)


if __name__ == "__main__":
    main()
