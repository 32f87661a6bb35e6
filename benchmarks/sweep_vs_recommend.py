"""CPU time of a sweep per candidate, and that of AISimulate's `recommend` on the same requests and fleets.

    python benchmarks/sweep_vs_recommend.py TRACE [--vary FLAG=VALUES …] [--jobs 2]
    python benchmarks/sweep_vs_recommend.py TRACE --recommend VENV/bin/aisimulate [--fleets 4x2,6x2,8x2]

The first form times 200 candidates; the goal is 90 s on two idle cores, 0.8 CPU s each. The second runs both tools on
the same trace and fleets (workers x tensor-parallel size), round robin, one process at a time; the goal is a ratio of
8. `pip install --pre aisimulate` has `recommend` (0.13.0.dev202610270000000085 was measured; 0.13.0 is a source package
whose build downloads files). CPU times include start-up and child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.publish import add_json_flag, publish

VARY = (
    "workers=4..12+2",
    "tensor-parallel-size=2,4",
    "max-num-batched-tokens=2048,8192",
    "max-num-seqs=64,128,256,512,1024",
    "routing=round_robin,kv",
)
"""200 combinations."""
GOAL = ("--slo-ttft-ms", "2000", "--slo-itl-ms", "50")
MODEL, GPU = "Qwen3-32B", "H200"
CONTEXT = 131072
"""Longest request that both accept, tokens; the longest of the conversation trace has 126,527."""

Fleet = tuple[int, int]
"""Workers and tensor-parallel size."""


def measure(command: list[str], log: Path | None = None) -> tuple[float, float]:
    """Run a command; return its wall and CPU time in s, children included."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with (log or Path(os.devnull)).open("w") as out:
        subprocess.run(command, check=True, stdout=out, stderr=out if log else None)
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sweep(trace: Path, vary: list[str], folder: Path, more: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Run our sweep; return its wall and CPU time in s, and its result."""
    out = folder / "sweep.json"
    command = [sys.executable, "-m", "understudy", "sweep", str(trace), "--vary", *vary, *GOAL, *more]
    command += ["--model", MODEL, "--gpu", GPU, "--block-size", "64", "--quiet", "--json", str(out)]
    wall_s, cpu_s = measure(command)
    result: dict[str, Any] = json.loads(out.read_text())
    return wall_s, cpu_s, result


def sweep_fleets(trace: Path, fleets: list[Fleet], folder: Path) -> tuple[float, int]:
    """Sweep over these fleets in one process; return the CPU time in s and the requests that each served."""
    sizes = {degree for _, degree in fleets}
    assert len(sizes) == 1, "fleets of one tensor-parallel size"
    vary = [f"workers={','.join(str(workers) for workers, _ in fleets)}"]
    same = ["--tensor-parallel-size", str(sizes.pop()), "--jobs", "1", "--max-model-len", str(CONTEXT)]
    same += ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
    _, cpu_s, result = sweep(trace, vary, folder, same)
    assert result["ran"] == len(fleets), result["failed"]
    return cpu_s, min(one["requests"] - one["rejected"] for one in result["trials"])


def recommend(tool: Path, trace: Path, fleets: list[Fleet], folder: Path) -> tuple[float, int]:
    """Run `recommend` over these fleets; return its CPU time in s and the requests that each served."""
    shapes = [
        {
            "replicas": workers,
            "tensor": degree,
            "pipeline": 1,
            "attention_data": 1,
            "moe_tensor": 1,
            "moe_expert": 1,
        }
        for workers, degree in fleets
    ]
    worker = {
        "parallelism": {"preset": shapes},
        "scheduler": {"max_batched_tokens": 8192, "max_sequences": 256},
        "kv_cache": {
            "block_size": 64,
            "prefix_caching": True,
            "capacity": {"type": "default", "memory_fraction": 0.9},
        },
    }
    limit = max(workers * degree for workers, degree in fleets)
    config = {
        "traffic": {
            "source": {"type": "trace", "format": "mooncake", "block_size": 512, "paths": [str(trace)]},
            "load": {"type": "trace_timestamps"},
        },
        "engine": {
            "mode": "aggregated",
            "model": f"Qwen/{MODEL}",
            "hardware": f"{GPU.lower()}_sxm",
            "backend": "vllm",
            "context_length": CONTEXT,
            "workers": {"aggregated": worker},
        },
        "optimization": {"target": "throughput_per_gpu", "constraints": {"max_candidate_gpus": limit}},
        "optimizer": {
            "algorithm": "random",
            "max_trials": len(fleets),
            "parallelism": 1,
            "candidate_timeout_seconds": 3600.0,
        },
        "execution": {
            "resources": {"initialization_timeout_seconds": 900.0, "shutdown_timeout_seconds": 60.0}
        },
    }
    path, out = folder / "recommend.json", folder / f"recommend-{len(fleets)}"
    path.write_text(json.dumps(config))
    command = [str(tool), "recommend", "-c", str(path), "--output-dir", str(out)]
    _, cpu_s = measure(command, folder / "recommend.log")
    result = json.loads((out / "recommendation.json").read_text())
    assert result["counts"]["feasible"] == len(fleets), result["counts"]
    return cpu_s, min(int(one["metrics"]["completed_requests"]) for one in result["candidates"])


def compare(trace: Path, tool: Path, fleets: list[Fleet], folder: Path) -> dict[str, dict[str, float]]:
    """Return the CPU seconds per candidate of both tools, and their ratio."""
    results = {
        "sweep": sweep_fleets(trace, fleets, folder),
        "recommend": recommend(tool, trace, fleets, folder),
    }
    (ours, served), (theirs, same) = results.values()
    assert served == same, "not the same requests"
    numbers = {"sweep": ours / len(fleets), "recommend": theirs / len(fleets), "ratio": theirs / ours}
    return {f"{served:,}": numbers}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--vary", nargs="+", default=list(VARY))
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--search", default="grid")
    parser.add_argument("--recommend", type=Path, metavar="AISIMULATE")
    parser.add_argument("--fleets", default="4x2,6x2,8x2", metavar="WORKERSxTP,…")
    add_json_flag(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.recommend is not None:
            fleets = [(int(one.split("x")[0]), int(one.split("x")[1])) for one in args.fleets.split(",")]
            measured = compare(args.trace.resolve(), args.recommend, fleets, folder)
            publish("sweep_vs_recommend", measured, args.json)
            return 0
        more = ["--jobs", args.jobs, "--search", args.search]
        wall_s, cpu_s, result = sweep(args.trace, args.vary, folder, more)
    ran = result["ran"]
    publish("sweep_time", {f"{ran} candidates": {"time": wall_s, "each": cpu_s / ran}}, args.json)
    best = result["answers"][0]["best"]
    print(f"answer: {None if best is None else best['flags']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
