"""Replay one trace with prefill and decode workers on Understudy and on NVIDIA Dynamo's Rust simulator, in one run.

    python benchmarks/disaggregation_vs_dynamo.py --trace PATH [--repeat 5] [--json [FOLDER]]

Blocks of 64, 16,384 a worker, polynomial timing, round robin in both pools, links without a limit (the peer then moves
blocks in no time). Runs alternate; CPU seconds of a whole call count, from opening the file to the finished report,
after imports, and the median of each side is printed.

The peer's decode worker gives the first token when the blocks are there. vLLM's polls, and computes the last token of
the prompt again in a step that it shares with running requests. So a run with every step recorded (not timed) counts
both: TTFT without the polls and without the time that the recomputed token adds to its step, and ITL without that time.
The difference to the peer after this is printed, and whether it is within 2 %. The rules are equal with round robin.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from harness.publish import publish
from replay_vs_dynamo import peer_python, read_arguments

Numbers = dict[str, dict[str, float]]
"""By row and column of a table."""

OURS = """
import json, resource, sys, time
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.run.disaggregation import Disaggregation
trace, prefill, decode, routing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
engine = VllmConfig(block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192, async_scheduling=False)
split = Disaggregation(prefill_workers=prefill, decode_workers=decode, decode_routing=routing)
start = time.process_time()
report = understudy.api.replay(trace, engine, routing=routing, disaggregation=split)
seconds = time.process_time() - start
parts = report.handoff.ttft_parts_ms
print(json.dumps({
    "seconds": seconds, "ttft_ms": report.ttft_ms.mean, "itl_ms": report.itl_ms.mean, "e2e_ms": report.e2e_ms.mean,
    "prompt_ms": parts["prefill queue"] + parts["prefill"], "hit": report.prefix_hit_ratio.first_admission,
    "completed": report.requests.completed, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""

AGREEMENT = """
import json, sys
import numpy as np
import understudy.api
from understudy.engines.vllm_config import VllmConfig
from understudy.run.disaggregation import Disaggregation
from understudy.run.options import Execution
trace, prefill, decode, routing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
engine = VllmConfig(block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192, async_scheduling=False)
split = Disaggregation(prefill_workers=prefill, decode_workers=decode, decode_routing=routing)
execution = Execution(keep_steps=True)
report = understudy.api.replay(trace, engine, routing=routing, disaggregation=split, execution=execution)
steps, parts = report.saved.steps, report.handoff.ttft_parts_ms
batches = int(steps.entry_batch.max()) + 1
prompts = np.bincount(steps.entry_batch, steps.entry_decodes == 0, batches)[steps.step_batch]
decodes = np.bincount(steps.entry_batch, steps.entry_decodes != 0, batches)[steps.step_batch]
with_prompt = (steps.step_worker >= prefill) & (prompts > 0)
added_ms = np.where(with_prompt, steps.step_compute_ns - steps.step_decodes_ns, 0) / 1e6
print(json.dumps({
    "poll_ms": parts["decode queue"] + parts["polls"],
    "token_ms": float(added_ms @ prompts) / report.handoff.remote,
    "itl_token_ms": float(added_ms @ decodes) / int(report.columns.itl_count.sum()),
}))
"""

THEIRS = """
import json, resource, sys, time
import dynamo.replay
trace, prefill, decode, routing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def args(role):
    return {"engine": {"block_size": 64, "worker_type": role}}
start = time.process_time()
report = dynamo.replay.run_trace_replay([trace], prefill_engine_args=args("prefill"), decode_engine_args=args("decode"),
    num_prefill_workers=prefill, num_decode_workers=decode, router_mode=routing, trace_block_size=512)
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


def main() -> int:
    args = read_arguments(__doc__)
    peer = str(peer_python(args.peer_venv))
    trace = str(args.trace)
    speed: Numbers = {}
    agreement: Numbers = {}
    for prefill, decode in ((2, 2), (4, 4)):
        for routing, theirs in (("round_robin", "round_robin"), ("kv", "kv_router")):
            name = f"{prefill}P + {decode}D {'KV router' if routing == 'kv' else 'round robin'}"
            us: list[dict[str, Any]] = []
            them: list[dict[str, Any]] = []
            size = (str(prefill), str(decode))
            for _ in range(args.repeat):
                us.append(call([sys.executable, "-c", OURS, trace, *size, routing]))
                them.append(call([peer, "-c", THEIRS, trace, *size, theirs]))
            ours_s, theirs_s = (statistics.median(run["seconds"] for run in runs) for runs in (us, them))
            speed[name] = {"Understudy": ours_s, "Dynamo": theirs_s, "ratio": theirs_s / ours_s}
            counted = call([sys.executable, "-c", AGREEMENT, trace, *size, routing])
            agreement[name] = compare(us[0], them[0], counted)
            print(f"{name}: {theirs_s / ours_s:.1f} ×", flush=True)
    publish("disaggregation_vs_dynamo", speed, args.json)
    publish("disaggregation_agreement", agreement, args.json)
    return 0


def call(command: list[str]) -> dict[str, Any]:
    """Run a side and read its last line."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any], counted: dict[str, Any]) -> dict[str, float]:
    """Return latencies of both, and ours without polls and the token that is computed again."""
    ttft_ms = ours["ttft_ms"] - counted["poll_ms"] - counted["token_ms"]
    itl_ms = ours["itl_ms"] - counted["itl_token_ms"]
    return {
        "until the prompt is computed": ours["prompt_ms"],
        "TTFT": ours["ttft_ms"],
        "peer's TTFT": theirs["ttft_ms"],
        "TTFT without polls and token": ttft_ms,
        "difference of that TTFT": 100 * (ttft_ms / theirs["ttft_ms"] - 1),
        "ITL": ours["itl_ms"],
        "peer's ITL": theirs["itl_ms"],
        "ITL without the token": itl_ms,
        "difference of that ITL": 100 * (itl_ms / theirs["itl_ms"] - 1),
        "hits": ours["hit"],
        "peer's hits": theirs["hit"],
        "peak": round(ours["peak_mb"]),
        "peer's peak": round(theirs["peak_mb"]),
    }


if __name__ == "__main__":
    sys.exit(main())
