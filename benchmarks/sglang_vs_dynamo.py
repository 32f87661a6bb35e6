"""Replay one trace on simulated SGLang workers, ours and those of NVIDIA Dynamo 1.6.1, in one interleaved run.

    python benchmarks/sglang_vs_dynamo.py --trace PATH [--repeat 5] [--json [FOLDER]]

Each run is a process of its own with one thread. It first replays ten rows, which imports what is imported on use, then
the trace. Numbers are medians: CPU seconds from opening the file to the finished report, and the peak memory of the
process. 4 workers, round robin, pages of 64 tokens (2^20 tokens of KV cache), polynomial timing. Also: pages of one
token, 64 workers with the KV router next to vLLM's, and two prefill and two decode workers (round robin, links without
a limit) next to Dynamo's and to vLLM's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from harness.publish import publish
from replay_vs_dynamo import peer_python, read_arguments

OURS = """
import json, resource, sys, time
import understudy as us
from understudy.run.options import Execution
first_rows, trace, kind, routing = sys.argv[1:5]
page, workers = map(int, sys.argv[5:])
make = us.SglangConfig if kind == "sglang" else us.VllmConfig
engine = make(block_size=page, num_gpu_blocks=2**20 // page)
options = {"workers": workers, "routing": routing, "execution": Execution(threads=1)}
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
first_rows, trace, page, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = dict(num_workers=workers, router_mode="round_robin", trace_block_size=512,
    extra_engine_args={"engine": {"backend": "sglang", "block_size": page}})
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

OURS_SPLIT = """
import json, resource, sys, time
import understudy as us
from understudy.run.disaggregation import Disaggregation
first_rows, trace, kind = sys.argv[1:4]
make = us.SglangConfig if kind == "sglang" else us.VllmConfig
engine = make(block_size=64, num_gpu_blocks=2**20 // 64)
split = Disaggregation(prefill_workers=2, decode_workers=2)
us.replay(first_rows, engine, disaggregation=split)
start = time.process_time()
report = us.replay(trace, engine, disaggregation=split)
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds, "ttft_ms": report.ttft_ms.mean, "itl_ms": report.itl_ms.mean, "e2e_ms": report.e2e_ms.mean,
    "hit": report.prefix_hit_ratio.first_admission, "completed": report.requests.completed,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""

THEIRS_SPLIT = """
import json, resource, sys, time
import dynamo.replay
first_rows, trace = sys.argv[1], sys.argv[2]
def args(role):
    return {"engine": {"backend": "sglang", "block_size": 64, "worker_type": role}}
options = dict(prefill_engine_args=args("prefill"), decode_engine_args=args("decode"),
    num_prefill_workers=2, num_decode_workers=2, router_mode="round_robin", trace_block_size=512)
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

PAGE_64, PAGE_1 = "SGLang, 4 workers, page size 64", "SGLang, 4 workers, page size 1"
DYNAMO = "Dynamo 1.6.1's SGLang, 4 workers, page size 64"
MANY, MANY_VLLM = "SGLang, 64 workers, KV router, page size 64", "vLLM, 64 workers, KV router, block size 64"

SPLIT, DYNAMO_SPLIT = "SGLang, 2P + 2D, page size 64", "Dynamo 1.6.1's SGLang, 2P + 2D, page size 64"
VLLM_SPLIT = "vLLM, 2P + 2D, block size 64"


def main() -> int:
    """Run all eight kinds `--repeat` times, interleaved, and print medians and ratios."""
    args = read_arguments(__doc__)
    peer = [str(peer_python(args.peer_venv)), "-c", THEIRS]
    us = [sys.executable, "-c", OURS]
    with tempfile.TemporaryDirectory() as folder:
        first_rows = Path(folder) / "rows.jsonl"
        with args.trace.open(encoding="utf-8") as trace:
            first_rows.write_text("".join(islice(trace, 10)), encoding="utf-8")
        files = [str(first_rows), str(args.trace)]
        commands = {
            PAGE_64: [*us, *files, "sglang", "round_robin", "64", "4"],
            DYNAMO: [*peer, *files, "64", "4"],
            PAGE_1: [*us, *files, "sglang", "round_robin", "1", "4"],
            MANY: [*us, *files, "sglang", "kv", "64", "64"],
            MANY_VLLM: [*us, *files, "vllm", "kv", "64", "64"],
            SPLIT: [sys.executable, "-c", OURS_SPLIT, *files, "sglang"],
            DYNAMO_SPLIT: [*peer[:2], THEIRS_SPLIT, *files],
            VLLM_SPLIT: [sys.executable, "-c", OURS_SPLIT, *files, "vllm"],
        }
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for _ in range(args.repeat):
            for name, command in commands.items():
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs[name].append(json.loads(output.strip().splitlines()[-1]))
    publish(
        "sglang_vs_dynamo", describe({name: middle(of_kind) for name, of_kind in runs.items()}), args.json
    )
    return 0


def describe(numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the columns of each run, and the ratios that have goals."""
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
    for name, theirs in ((PAGE_64, DYNAMO), (SPLIT, DYNAMO_SPLIT)):
        rows[name]["Dynamo's time / ours"] = rows[theirs]["time"] / rows[name]["time"]
    for name, base in ((PAGE_1, PAGE_64), (MANY, MANY_VLLM), (SPLIT, VLLM_SPLIT)):
        rows[name]["time of page size 64, or of vLLM"] = rows[name]["time"] / rows[base]["time"]
    return rows


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one of the runs, with the medians of time and memory."""
    return {**runs[0], **{key: median(run[key] for run in runs) for key in ("seconds", "peak_mb")}}


if __name__ == "__main__":
    sys.exit(main())
