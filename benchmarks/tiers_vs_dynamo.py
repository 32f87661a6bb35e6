"""Replay one trace with a host tier on Understudy and on NVIDIA Dynamo's simulator, one after the other.

    python benchmarks/tiers_vs_dynamo.py --trace PATH [--repeat 3] [--json [FOLDER]]

Blocks of 64, 4,096 of them on each of 8 workers, round robin; a host tier of 65,536 blocks a worker, 131,072 bytes a
token, 25 GB/s each way. The peer (ai-dynamo-runtime 1.6.1) writes through, so that is the policy it is compared with;
offload on eviction is shown beside it. Each call is timed from opening the file to the finished report, after imports,
on one thread, in a process of its own; the best of the repeats counts, and runs take turns. Both schedule
synchronously, which is the peer's only mode.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from harness.publish import publish
from replay_vs_dynamo import best, peer_python, read_arguments

OURS = """
import json, resource, sys, time
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.tiers import TiersConfig
trace, mode = sys.argv[1:]
engine = VllmConfig(block_size=64, num_gpu_blocks=4096, max_num_batched_tokens=8192, async_scheduling=False)
tiers = None if mode == "none" else TiersConfig.from_dict({
    "kv_bytes_per_token": 131072,
    "tiers": [{"tier": "g2", "blocks": 65536, "link": {"down_gbps": 25, "up_gbps": 25}}],
    "offload": {"mode": mode},
})
start = time.perf_counter()
report = understudy.api.replay(trace, engine, workers=8, tiers=tiers)
seconds = time.perf_counter() - start
host = None if tiers is None else report.tiers.tiers[1].hit_ratio_first
print(json.dumps({
    "seconds": seconds, "hit": report.prefix_hit_ratio.first_admission, "host_hit": host,
    "ttft_ms": report.ttft_ms.mean, "e2e_ms": report.e2e_ms.mean, "completed": report.requests.completed,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "digest": report.run.digest,
}))
"""

THEIRS = """
import json, resource, sys, time
import dynamo.replay
trace, mode = sys.argv[1:]
engine = {"block_size": 64, "num_gpu_blocks": 4096, "kv_cache_bytes_per_token": 131072}
if mode != "none":
    engine["native_host_offload"] = {
        "num_host_blocks": 65536, "d2h_bandwidth_gbps": 25, "h2d_bandwidth_gbps": 25}
start = time.perf_counter()
report = dynamo.replay.run_trace_replay([trace], extra_engine_args={"engine": engine},
    num_workers=8, router_mode="round_robin", trace_block_size=512)
seconds = time.perf_counter() - start
summary = report if isinstance(report, dict) else report.summary
if not isinstance(summary, dict):
    summary = vars(summary)
print(json.dumps({
    "seconds": seconds, "hit": summary["prefix_cache_reused_ratio"], "host_hit": None,
    "ttft_ms": summary["mean_ttft_ms"], "e2e_ms": summary["mean_e2e_latency_ms"],
    "completed": summary["completed_requests"],
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> int:
    args = read_arguments(__doc__)
    peer = str(peer_python(args.peer_venv))
    trace = str(args.trace)
    commands = {
        "no tier": [sys.executable, "-c", OURS, trace, "none"],
        "write-through": [sys.executable, "-c", OURS, trace, "write_through"],
        "on eviction": [sys.executable, "-c", OURS, trace, "evict"],
        "peer, no tier": [peer, "-c", THEIRS, trace, "none"],
        "peer, write-through": [peer, "-c", THEIRS, trace, "write_through"],
    }
    runs = take_turns(commands, args.repeat)
    publish("tiers_vs_dynamo", compare(runs), args.json)
    for name, run in runs.items():
        host = "" if run["host_hit"] is None else f" ({run['host_hit']:.4f} from the host)"
        print(
            f"{name}: median {run['median']:.3f} s, hit ratio {run['hit']:.4f}{host}; E2E {run['e2e_ms']:,.0f} ms, "
            f"{run['completed']:,} completed, {run['peak_mb']:.0f} MB"
        )
    return 0


def take_turns(commands: dict[str, list[str]], repeat: int) -> dict[str, dict[str, Any]]:
    """The fastest run of each, with the median; in rounds, so that a busy moment does not hit one of them alone."""
    rounds = [{name: best(command, 1) for name, command in commands.items()} for _ in range(repeat)]
    return {
        name: {
            **min((one[name] for one in rounds), key=lambda run: run["seconds"]),
            "median": median(one[name]["seconds"] for one in rounds),
        }
        for name in commands
    }


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds, hits and TTFT beside the peer's, and what a tier costs; ratios are those of the best runs."""
    rows: dict[str, dict[str, float]] = {}
    for name, ours, theirs in (
        ("no tier", "no tier", "peer, no tier"),
        ("write-through", "write-through", "peer, write-through"),
        ("on eviction, beside the peer's write-through", "on eviction", "peer, write-through"),
    ):
        us, them = runs[ours], runs[theirs]
        row = rows[name] = {
            "Understudy": us["seconds"],
            "prefix hit": us["hit"],
            "TTFT": round(us["ttft_ms"]),
        }
        row["times as fast"] = them["seconds"] / us["seconds"]
        if ours != "no tier":
            row["time of a run without a tier"] = us["seconds"] / runs["no tier"]["seconds"]
        if ours != "on eviction":
            row |= {"peer": them["seconds"], "the peer's hit": them["hit"]}
            row["the peer's TTFT"] = round(them["ttft_ms"])
        if ours == "write-through":
            row["the peer's"] = them["seconds"] / runs["peer, no tier"]["seconds"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
