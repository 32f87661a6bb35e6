"""Replay traces of agents on Understudy and on NVIDIA Dynamo's Rust simulator, and print CPU seconds and their ratio.

    python benchmarks/agents_vs_dynamo.py --weka weka-real-20.jsonl.gz --deltas aiperf-agentic-code.jsonl.gz [--json]

The peer (ai-dynamo-runtime 1.6.1) is installed into a virtual environment of its own on first use. Each call is timed
from opening the file to the finished report, after imports, in a process of its own, in CPU seconds of user and system;
the seconds of the whole process are beside them. Blocks of 64, 16,384 of them. Weka traces: 4 workers, the KV router,
8 lanes, the recorded clock. Deltas: one worker, open loop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.publish import add_json_flag, publish
from replay_vs_dynamo import PEER_NAME, peer_python

OURS = """
import json, resource, sys
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.workload import Plays
def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
start = cpu_s()
lanes = int(sys.argv[2])
engine = VllmConfig(block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192, async_scheduling=False)
agents = {"workers": 4, "routing": "kv", "load": Plays(lanes=lanes, clock="recorded")} if lanes else {}
report = understudy.api.replay(sys.argv[1], engine, **agents)
report.to_dict()
print(json.dumps({
    "cpu_s": cpu_s() - start, "whole_s": cpu_s(), "hit": report.prefix_hit_ratio.first_admission,
    "ttft_ms": report.ttft_ms.mean, "completed": report.requests.completed,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""

THEIRS = """
import json, resource, sys
import dynamo.replay
def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
start = cpu_s()
trace, lanes = sys.argv[1], int(sys.argv[2])
engine = {"engine": {"block_size": 64, "num_gpu_blocks": 16384, "max_num_batched_tokens": 8192}}
agents = {"num_workers": 4, "router_mode": "kv_router", "agentic_lanes": lanes, "trace_format": "weka"}
agents["execution_model"] = "model"
deltas = {"trace_format": "mooncake-delta", "trace_block_size": 512}
report = dynamo.replay.run_trace_replay([trace], extra_engine_args=engine, **(agents if lanes else deltas))
summary = report if isinstance(report, dict) else report.summary
summary = summary if isinstance(summary, dict) else vars(summary)
print(json.dumps({
    "cpu_s": cpu_s() - start, "whole_s": cpu_s(), "hit": summary["prefix_cache_reused_ratio"],
    "ttft_ms": summary["mean_ttft_ms"], "completed": summary["completed_requests"],
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weka", type=Path, required=True, help="Weka traces")
    parser.add_argument(
        "--deltas", type=Path, required=True, help="deltas of sessions, as AIPerf generates them"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--peer-venv", type=Path, default=Path("build/dynamo-venv"))
    add_json_flag(parser)
    args = parser.parse_args()
    peer = peer_python(args.peer_venv)
    rows: dict[str, dict[str, float]] = {}
    for name, trace, lanes in (("Weka traces", args.weka, 8), ("AIPerf's deltas", args.deltas, 0)):
        ours = best([sys.executable, "-c", OURS, str(trace), str(lanes)], args.repeat)
        theirs = best(
            [str(peer), "-c", THEIRS, str(unzipped(trace, args.peer_venv)), str(lanes)], args.repeat
        )
        rows[name] = {**describe(ours), "Dynamo's time / ours": theirs["cpu_s"] / ours["cpu_s"]}
        rows[f"{name}, {PEER_NAME}"] = describe(theirs)
    publish("agents_vs_dynamo", rows, args.json)
    return 0


def describe(run: dict[str, Any]) -> dict[str, float]:
    """The columns of a run."""
    return {
        "time": run["cpu_s"],
        "with imports": run["whole_s"],
        "peak": round(run["peak_mb"]),
        "TTFT, mean": run["ttft_ms"],
        "reuse": run["hit"],
    }


def unzipped(trace: Path, folder: Path) -> Path:
    """The trace as the peer reads it: plain."""
    if trace.suffix != ".gz":
        return trace
    import gzip

    plain = folder / trace.stem
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    return plain


def best(command: list[str], repeat: int) -> dict[str, Any]:
    """The run of least CPU time of `repeat` runs."""
    runs = []
    for _ in range(repeat):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output.strip().splitlines()[-1]))
    return min(runs, key=lambda run: run["cpu_s"])


if __name__ == "__main__":
    sys.exit(main())
