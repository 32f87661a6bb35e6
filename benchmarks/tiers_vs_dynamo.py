"""Replay one trace with a host tier on Understudy and on NVIDIA Dynamo's simulator, one after the other.

    python benchmarks/tiers_vs_dynamo.py --trace PATH [--repeat 3] [--json PATH]

Blocks of 64, 4,096 of them on each of 8 workers, round robin; a host tier of 65,536 blocks a worker, 131,072 bytes a
token, 25 GB/s each way. The peer (ai-dynamo-runtime 1.6.1) writes through, so that is the policy it is compared with;
offload on eviction is shown beside it. Each call is timed from opening the file to the finished report, after imports,
on one thread, in a process of its own; the best of the repeats counts, and runs take turns. Both schedule
synchronously, which is the peer's only mode.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness.report import Row, machine, table, write_json
from replay_vs_dynamo import PEER, best, peer_python, read_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_RATIO = 12.0
MOST_COST = 2.0

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
    rows = compared(runs)
    console = Console(width=120)
    console.print(table("A host tier below the GPU", PEER, rows))
    for name, run in runs.items():
        host = "" if run["host_hit"] is None else f" ({run['host_hit']:.4f} from the host)"
        console.print(
            f"{name}: hit ratio {run['hit']:.4f}{host}; TTFT {run['ttft_ms']:,.0f} ms, E2E {run['e2e_ms']:,.0f} ms, "
            f"{run['completed']:,} completed, {run['peak_mb']:.0f} MB"
        )
    console.print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    if args.json:
        write_json(args.json, {"machine": machine(), "runs": runs}, rows)
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


def compared(runs: dict[str, dict[str, Any]]) -> Sequence[Row]:
    """Seconds beside the peer's best, and what tiers cost; ratios are those of the best."""
    seconds = {name: run["seconds"] for name, run in runs.items()}
    rows = []
    for name, peer, judged in (
        ("no tier", "peer, no tier", False),
        ("write-through", "peer, write-through", True),
        ("on eviction", "peer, write-through", True),
    ):
        ratio = seconds[peer] / seconds[name]
        rows.append(
            Row(
                "trace to report",
                name,
                "s",
                runs[name]["median"],
                best=seconds[name],
                peer=seconds[peer],
                ratio=ratio,
                target=f"≥ {LEAST_RATIO:g}×" if judged else "",
                met=ratio >= LEAST_RATIO if judged else None,
            )
        )
    for name in ("write-through", "on eviction"):
        cost = seconds[name] / seconds["no tier"]
        rows.append(
            Row(
                "tier ÷ no tier",
                name,
                "×",
                runs[name]["median"] / runs["no tier"]["median"],
                best=cost,
                peer=seconds["peer, write-through"] / seconds["peer, no tier"],
                target=f"≤ {MOST_COST:g}",
                met=cost <= MOST_COST,
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
