"""Replay one trace on simulated TensorRT-LLM workers, ours and those of NVIDIA Dynamo 1.6.1, in one interleaved run.

    python benchmarks/trtllm_vs_dynamo.py --trace PATH [--repeat 5] [--json [FOLDER]]

Each run is a process of its own with one thread. It first replays ten rows, which imports what is imported on use, then
the trace. Numbers are medians: CPU seconds from opening the file to the finished report, and the peak memory of the
process. 4 workers, round robin, blocks of 32 tokens (2^20 tokens of KV cache, no host level), chunked prompts,
polynomial timing. Where Dynamo's mocker has no backend of that name, its default runs, and the output says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from harness.publish import publish
from replay_vs_dynamo import peer_python, read_arguments
from sglang_vs_dynamo import middle

OURS = """
import json, resource, sys, time
import understudy as us
from understudy.run.options import Execution
first_rows, trace, kind, block = *sys.argv[1:4], int(sys.argv[4])
pool = {"block_size": block, "num_gpu_blocks": 2**20 // block}
more = {"enable_chunked_prefill": True, "host_cache_size": 0}
engine = us.TrtllmConfig(**pool, **more) if kind == "trtllm" else us.VllmConfig(**pool)
options = {"workers": 4, "routing": "round_robin", "execution": Execution(threads=1)}
us.replay(first_rows, engine, **options)
start = time.process_time()
report = us.replay(trace, engine, **options)
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds, "ttft_ms": report.ttft_ms.mean, "itl_ms": report.itl_ms.mean, "e2e_ms": report.e2e_ms.mean,
    "hit": report.prefix_hit_ratio.first_admission, "completed": report.requests.completed,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""

THEIRS = """
import json, resource, sys, time
import dynamo.replay
first_rows, trace, block, backend = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
engine = {"block_size": block, **({"backend": backend} if backend else {})}
options = dict(num_workers=4, router_mode="round_robin", trace_block_size=512, extra_engine_args={"engine": engine})
dynamo.replay.run_trace_replay([first_rows], **options)
start = time.process_time()
report = dynamo.replay.run_trace_replay([trace], **options)
seconds = time.process_time() - start
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

TRTLLM, VLLM = "TensorRT-LLM, 4 workers", "vLLM, 4 workers"
DYNAMO = "Dynamo 1.6.1's TensorRT-LLM, 4 workers"
BLOCK = "32"


def main() -> int:
    """Run all kinds `--repeat` times, interleaved, and print medians and ratios."""
    args = read_arguments(__doc__)
    peer = [str(peer_python(args.peer_venv)), "-c", THEIRS]
    us = [sys.executable, "-c", OURS]
    with tempfile.TemporaryDirectory() as folder:
        first_rows = Path(folder) / "rows.jsonl"
        with args.trace.open(encoding="utf-8") as trace:
            first_rows.write_text("".join(islice(trace, 10)), encoding="utf-8")
        files = [str(first_rows), str(args.trace)]
        backend = find_backend([*peer, str(first_rows), str(first_rows), BLOCK])
        commands = {
            TRTLLM: [*us, *files, "trtllm", BLOCK],
            DYNAMO: [*peer, *files, BLOCK, backend],
            VLLM: [*us, *files, "vllm", BLOCK],
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(args.repeat):
            for name, command in commands.items():
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[name].append(json.loads(output.strip().splitlines()[-1]))
    publish(
        "trtllm_vs_dynamo", describe({name: middle(of_kind) for name, of_kind in runs.items()}), args.json
    )
    return 0


def find_backend(command: list[str]) -> str:
    """Return the mocker's TensorRT-LLM backend; empty where it has none, and its default is run."""
    tried = subprocess.run([*command, "trtllm"], capture_output=True, text=True)
    if tried.returncode == 0:
        return "trtllm"
    print(f"Dynamo has no backend 'trtllm', so its default runs: {tried.stderr.strip().splitlines()[-1]}")
    return ""


def describe(numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the columns of each run, and the ratio that has a goal."""
    rows = {
        name: {
            "time": run["seconds"],
            "peak": round(run["peak_mb"]),
            "TTFT, mean": run["ttft_ms"],
            "ITL, mean": run["itl_ms"],
            "prefix hit": run["hit"],
        }
        for name, run in numbers.items()
    }
    rows[TRTLLM]["Dynamo's time / ours"] = rows[DYNAMO]["time"] / rows[TRTLLM]["time"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
