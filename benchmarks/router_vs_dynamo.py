"""The prefix index and the KV-aware replay beside Dynamo 1.6.1's, one after the other in one run.

    python benchmarks/router_vs_dynamo.py [--trace PATH] [--repeat 3] [--json [FOLDER]]

The peer (ai-dynamo-runtime 1.6.1) is installed into a virtual environment of its own on first use. Index: blocks of
prompts of 2,000, applied in batches by the peer's RadixTree (JSON events, its only way in) and by ours; `find` asks for
one prompt that all workers hold. Replay, with a trace: KV router, blocks of 64, 16,384 of them, synchronous scheduling
(the peer's only mode), CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.publish import add_json_flag, publish
from replay_vs_dynamo import peer_python

PROMPT = 2000
Numbers = dict[str, dict[str, float]]
"""By row and column of the table."""

OUR_INDEX = """
import json, resource, sys, time
import numpy as np
from understudy.router import PrefixIndex
blocks, workers, prompt = map(int, sys.argv[1:])
hashes = np.random.default_rng(0).integers(0, 2**64, blocks, np.uint64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = PrefixIndex()
start = time.process_time()
for worker in range(workers):
    for first in range(0, blocks, prompt):
        index.store(worker, hashes[first:first + prompt])
apply_s = time.process_time() - start
memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
times = []
for first in (np.random.default_rng(1).integers(0, blocks // prompt, 400) * prompt).tolist():
    asked = hashes[first:first + prompt]
    start = time.perf_counter()
    found = index.find(asked)
    times.append(time.perf_counter() - start)
assert (found.blocks[:, 0] == prompt).all()
times.sort()
print(json.dumps({"blocks_per_s": blocks * workers / apply_s, "find_us": times[len(times) // 2] * 1e6,
                  "find_best_us": times[0] * 1e6, "memory_mb": memory_mb}))
"""

THEIR_INDEX = """
import json, resource, sys, time
import numpy as np
from dynamo._core import RadixTree
blocks, workers, prompt = map(int, sys.argv[1:])
hashes = np.random.default_rng(0).integers(0, 2**63, blocks).tolist()
events = []
for first in range(0, blocks, prompt):
    stored = [{"block_hash": h, "tokens_hash": h} for h in hashes[first:first + prompt]]
    events.append(json.dumps({"event_id": first, "data": {"stored": {"parent_hash": None, "blocks": stored}},
                              "dp_rank": 0}).encode())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tree = RadixTree()
start = time.process_time()
for worker in range(workers):
    for event in events:
        tree.apply_event(worker, event)
apply_s = time.process_time() - start
memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
times = []
for first in (np.random.default_rng(1).integers(0, blocks // prompt, 200) * prompt).tolist():
    asked = hashes[first:first + prompt]
    start = time.perf_counter()
    found = tree.find_matches(asked)
    times.append(time.perf_counter() - start)
assert max(found.scores.values()) == prompt
times.sort()
print(json.dumps({"blocks_per_s": blocks * workers / apply_s, "find_us": times[len(times) // 2] * 1e6,
                  "find_best_us": times[0] * 1e6, "memory_mb": memory_mb}))
"""

OUR_REPLAY = """
import json, resource, sys, time
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.engines.mocker_settings import MockerSettings
from understudy.router import KvRouting
trace, workers = sys.argv[1], int(sys.argv[2])
mocker = MockerSettings(charge_first_token=False)
sizes = {"block_size": 64, "num_gpu_blocks": 16384, "max_num_batched_tokens": 8192}
engine = VllmConfig(**sizes, mocker=mocker, async_scheduling=False)
start = time.process_time()
report = understudy.api.replay(trace, engine, workers=workers, routing=KvRouting())
print(json.dumps({"cpu_s": time.process_time() - start, "ttft_ms": report.ttft_ms.mean,
                  "hit": report.prefix_hit_ratio.first_admission,
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

THEIR_REPLAY = """
import json, resource, sys, time
import dynamo.replay
trace, workers = sys.argv[1], int(sys.argv[2])
start = time.process_time()
report = dynamo.replay.run_trace_replay([trace], extra_engine_args={"engine": {"block_size": 64,
    "num_gpu_blocks": 16384}}, num_workers=workers, router_mode="kv_router", trace_block_size=512)
summary = report if isinstance(report, dict) else report.summary
if not isinstance(summary, dict):
    summary = vars(summary)
print(json.dumps({"cpu_s": time.process_time() - start, "ttft_ms": summary["mean_ttft_ms"],
                  "hit": summary["prefix_cache_reused_ratio"],
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def main() -> int:
    """Measure, print, and write the numbers if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="Mooncake JSONL for the replays")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--peer-venv", type=Path, default=Path("build/dynamo-venv"))
    add_json_flag(parser)
    args = parser.parse_args()
    peer = str(peer_python(args.peer_venv))
    publish("router_index", measure_index(peer, args.repeat), args.json)
    if args.trace is not None:
        publish("router_replays", measure_replays(peer, str(args.trace), args.repeat), args.json)
    return 0


def measure_index(peer: str, repeat: int) -> Numbers:
    """Apply and find in both indices; the peer's events are JSON, and more than 4 workers take minutes."""
    theirs = best([peer, "-c", THEIR_INDEX, "1000000", "4", str(PROMPT)], 1, "find_us")
    found: Numbers = {}
    for blocks in (1_000_000, 10_000_000):
        ours = best([sys.executable, "-c", OUR_INDEX, str(blocks), "64", str(PROMPT)], repeat, "find_us")
        size = f"{blocks // 1_000_000} M blocks × 64 workers"
        sides = {"Understudy": ours} | ({"peer, 4 workers": theirs} if blocks == 1_000_000 else {})
        for name, key, scale in (
            (f"apply, {size}", "blocks_per_s", 1e-6),
            (f"find, {size}, median", "find_us", 1.0),
            (f"memory, {size}", "memory_mb", 1.0),
        ):
            found[name] = {side: run[key] * scale for side, run in sides.items()}
        found[f"find, {size}, median"]["best"] = ours["find_best_us"]
    return found


def measure_replays(peer: str, trace: str, repeat: int) -> Numbers:
    """CPU seconds and memory of replays with the KV router."""
    found: Numbers = {}
    for workers in (4, 16, 64):
        ask = [trace, str(workers)]
        ours = best([sys.executable, "-c", OUR_REPLAY, *ask], repeat, "cpu_s")
        theirs = best([peer, "-c", THEIR_REPLAY, *ask], repeat, "cpu_s")
        found[f"{workers} workers"] = {
            "Understudy": ours["cpu_s"],
            "peak": round(ours["peak_mb"]),
            "Dynamo": theirs["cpu_s"],
            "its peak": round(theirs["peak_mb"]),
            "ratio": theirs["cpu_s"] / ours["cpu_s"],
        }
    return found


def best(command: list[str], repeat: int, key: str) -> dict[str, Any]:
    """The run with the least `key`."""
    runs = []
    for _ in range(repeat):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output.strip().splitlines()[-1]))
    return min(runs, key=lambda run: float(run[key]))


if __name__ == "__main__":
    sys.exit(main())
