"""Replay one trace on Understudy and on NVIDIA Dynamo's Rust simulator, one after the other, and print the ratio.

    python benchmarks/replay_vs_dynamo.py --trace PATH [--repeat 3] [--json [FOLDER]]

The peer (ai-dynamo-runtime 1.6.1) is installed into a virtual environment of its own on first use. Each call is timed
from opening the file to the finished report, after imports, in a process of its own. Blocks of 64, 16,384 of them,
4 workers, round robin, polynomial timing; synchronous scheduling on both sides, which is the peer's only mode. Both
play it closed loop, too, 64 requests at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from harness.publish import add_json_flag, publish

PEER = "ai-dynamo-runtime==1.6.1"
PEER_NAME = PEER.replace("==", " ")
OURS_1, OURS_2, THEIRS_1 = "Understudy, 1 thread", "Understudy, 2 threads", PEER_NAME
OURS_CLOSED, THEIRS_CLOSED = "Understudy, closed loop of 64", f"{PEER_NAME}, closed loop of 64"
OURS_16, OURS_512 = "Understudy, block 16 (65,536 blocks)", "Understudy, block 512 (2,048 blocks)"
PEER_NEEDS = (PEER, "msgspec", "pyzmq", "numpy", "pyyaml", "transformers", "prometheus_client")
PEER_PYTHON = "ai-dynamo==1.6.1"  # without its dependencies: they are a serving stack

OURS = """
import json, resource, sys, time
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.run.options import Execution
from understudy.workload import ClosedLoop
trace, block_size, num_blocks, workers, threads, concurrency = sys.argv[1], *map(int, sys.argv[2:])
load = ClosedLoop(concurrency) if concurrency else None
sizes = {"block_size": block_size, "num_gpu_blocks": num_blocks, "max_num_batched_tokens": 8192}
engine = VllmConfig(**sizes, async_scheduling=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
report = understudy.api.replay(trace, engine, workers=workers, load=load, execution=Execution(threads=threads))
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds, "ttft_ms": report.ttft_ms.mean, "itl_ms": report.itl_ms.mean, "e2e_ms": report.e2e_ms.mean,
    "hit": report.prefix_hit_ratio.first_admission, "completed": report.requests.completed,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "digest": report.run.digest,
}))
"""

THEIRS = """
import json, resource, sys, time
import dynamo.replay
trace, block_size, workers, concurrency = sys.argv[1], *map(int, sys.argv[2:])
start = time.perf_counter()
report = dynamo.replay.run_trace_replay([trace], extra_engine_args={"engine": {"block_size": block_size}},
    num_workers=workers, router_mode="round_robin", trace_block_size=512, replay_concurrency=concurrency or None)
seconds = time.perf_counter() - start
summary = report if isinstance(report, dict) else report.summary
if not isinstance(summary, dict):
    summary = vars(summary)
print(json.dumps({
    "seconds": seconds, "ttft_ms": summary["mean_ttft_ms"], "itl_ms": summary["mean_itl_ms"],
    "e2e_ms": summary["mean_e2e_latency_ms"], "hit": summary["prefix_cache_reused_ratio"],
    "completed": summary["completed_requests"],
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""


def main() -> int:
    args = read_arguments(__doc__)
    peer = peer_python(args.peer_venv)

    trace = str(args.trace)
    numbers: dict[str, Any] = {
        OURS_1: best(ours(trace, 64, 16384, 4), args.repeat),
        OURS_2: best(ours(trace, 64, 16384, 4, threads=2), args.repeat),
        THEIRS_1: best([str(peer), "-c", THEIRS, trace, "64", "4", "0"], args.repeat),
        OURS_CLOSED: best(ours(trace, 64, 16384, 4, concurrency=64), args.repeat),
        THEIRS_CLOSED: best([str(peer), "-c", THEIRS, trace, "64", "4", "64"], args.repeat),
        OURS_16: best(ours(trace, 16, 65536, 4), args.repeat),
        OURS_512: best(ours(trace, 512, 2048, 4), args.repeat),
        "Understudy, unlimited blocks, 1 worker": best(ours(trace, 64, 4_000_000, 1), 1),
        "Understudy, unlimited blocks, 4 workers": best(ours(trace, 64, 4_000_000, 4), 1),
    }
    publish("replay_vs_dynamo", describe(numbers), args.json)
    for key in ("ttft_ms", "itl_ms", "e2e_ms", "hit"):
        difference = numbers[OURS_1][key] / numbers[THEIRS_1][key] - 1
        print(f"{key}: ours differs from the peer's by {difference:+.2%}")
    return 0


def ours(
    trace: str, block_size: int, num_blocks: int, workers: int, *, threads: int = 1, concurrency: int = 0
) -> list[str]:
    """The command of a replay of ours; above 0, `concurrency` closes the loop."""
    return [
        sys.executable,
        "-c",
        OURS,
        trace,
        *map(str, (block_size, num_blocks, workers, threads, concurrency)),
    ]


def read_arguments(description: str | None) -> argparse.Namespace:
    """The flags of every benchmark against this peer."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, required=True, help="Mooncake JSONL with hash blocks of 512 tokens"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts")
    parser.add_argument("--peer-venv", type=Path, default=Path("build/dynamo-venv"))
    add_json_flag(parser)
    return parser.parse_args()


def peer_python(directory: Path) -> Path:
    """The interpreter of the peer's environment, installed on first use."""
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        print(f"installing {PEER} into {directory} …", flush=True)
        venv.create(directory, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEER_NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", PEER_PYTHON], check=True)
        (directory / "installed").touch()
    return python


def best(command: list[str], repeat: int) -> dict[str, Any]:
    """The fastest of `repeat` runs."""
    runs = []
    for _ in range(repeat):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append(json.loads(output.strip().splitlines()[-1]))
    return min(runs, key=lambda run: run["seconds"])


def describe(numbers: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the columns of each run, with its speed beside the peer's."""
    rows = {
        name: {
            "time": run["seconds"],
            "peak": round(run["peak_mb"]),
            "TTFT, mean": run["ttft_ms"],
            "ITL, mean": run["itl_ms"],
            "E2E, mean": run["e2e_ms"],
            "prefix hit": run["hit"],
        }
        for name, run in numbers.items()
    }
    for name, other in ((OURS_1, THEIRS_1), (OURS_2, THEIRS_1), (OURS_CLOSED, THEIRS_CLOSED)):
        rows[name]["times as fast as the peer"] = rows[other]["time"] / rows[name]["time"]
    rows[OURS_16]["time of block 512"] = rows[OURS_16]["time"] / rows[OURS_512]["time"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
