"""The KV-aware router beside Dynamo 1.6.1's: every cost and overlap, with its choices imposed.

    python benchmarks/router_parity.py --traces PATH --choices PATH
    python benchmarks/router_parity.py --traces PATH --peer [--only synthetic] [--runs 5]

PATH holds the Mooncake traces (`mooncake_conversation.jsonl`, `mooncake_synthetic.jsonl`), and what the peer chose: a
line a request in arrival order, `worker cost overlap`, in `dec_NAME.txt.gz`. Engines schedule synchronously, as the
peer's do. With `--peer` the peer runs beside us (installed on first use): round robin must agree in every mean, the KV
router, whose ties each side draws for itself, in means over some runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from replay_vs_dynamo import peer_python
from understudy.engines.config import VllmConfig
from understudy.report import Report
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.workload import read_trace

CASES = {
    "dec_conversation_4_16384": ("mooncake_conversation", 0.0),
    "dec_synthetic_4_16384": ("mooncake_synthetic", 0.0),
    "dec_syn_lag50": ("mooncake_synthetic", 50.0),
    "dec_syn_lag5000": ("mooncake_synthetic", 5000.0),
}
ENGINE = VllmConfig(block_size=64, num_gpu_blocks=16384, charge_first_token=False, async_scheduling=False)
WORKERS = 4
TOLERANCE = 1e-6


def compare(name: str, trace: Path, choices: Path, delay_ms: float) -> bool:
    """Print one line; True when every decision agrees."""
    with gzip.open(choices, "rt") as file:
        peer = np.loadtxt(file)
    workload = read_trace(trace)
    router = KvRouting(event_delay_ms=delay_ms).build(imposed=peer[:, 0].astype(np.int32))
    timeline = run_offline(workload, ENGINE, workers=WORKERS, routing=router, route_rejected=True).timeline
    ours = router.decisions
    assert len(ours) == len(peer), f"{len(ours)} decisions, the peer made {len(peer)}"
    costs = np.abs(ours.cost - peer[:, 1]) > TOLERANCE
    overlaps = ours.overlap_blocks != peer[:, 2]
    done = timeline.completed
    ttft_ms = (timeline.first_token_ns - timeline.arrival_ns)[done].mean() / 1e6
    hit = timeline.cached_tokens_first.sum() / timeline.prompt_tokens.sum()
    print(
        f"{name:28} {len(peer):7,} decisions  {costs.sum():6,} costs and {overlaps.sum():6,} overlaps differ"
        f"   TTFT {ttft_ms:9.2f} ms  hit {hit:7.2%}"
    )
    return not (costs.any() or overlaps.any())


PEER_RUN = """
import json, sys
import dynamo.replay
trace, workers, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
report = dynamo.replay.run_trace_replay([trace], extra_engine_args={"engine": {"block_size": 64,
    "num_gpu_blocks": 16384}}, num_workers=workers, router_mode=mode, trace_block_size=512)
summary = report if isinstance(report, dict) else report.summary
summary = summary if isinstance(summary, dict) else vars(summary)
print(json.dumps([summary["mean_ttft_ms"], summary["mean_itl_ms"], summary["prefix_cache_reused_ratio"]]))
"""


def beside_peer(python: Path, trace: Path, workers: int, runs: int) -> bool:
    """Round robin once, the KV router some times on both sides. True when all that must agree does."""
    workload, fine = read_trace(trace), True
    for mode, count in (("round_robin", 1), ("kv_router", runs)):
        sides: dict[str, list[list[float]]] = {"ours": [], "peer": []}
        for seed in range(count):
            routing: Any = "round_robin" if mode == "round_robin" else KvRouting()
            run = run_offline(
                workload, ENGINE, workers=workers, routing=routing, seed=seed, route_rejected=True
            )
            report = Report.build(run.timeline, run.facts)
            hit = report.prefix_hit_ratio.first_admission
            sides["ours"].append([report.ttft_ms.mean or 0, report.itl_ms.mean or 0, hit or 0])
            command = [str(python), "-c", PEER_RUN, str(trace), str(workers), mode]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            sides["peer"].append(json.loads(output.strip().splitlines()[-1]))
        ours, peer = (np.mean(sides[side], axis=0) for side in ("ours", "peer"))
        apart = np.abs(ours / peer - 1)
        limits = [1e-4] * 3 if mode == "round_robin" else [0.01, np.inf, 0.03]
        print(
            f"{trace.stem:24} {workers:3} workers {mode:12} {count} runs  "
            + "  ".join(
                f"{name} {a:,.4f} / {b:,.4f} ({d:.2%})"
                for name, a, b, d in zip(("TTFT ms", "ITL ms", "hit"), ours, peer, apart, strict=True)
            ),
            flush=True,
        )
        fine = fine and bool((apart <= limits).all())
    return fine


def main() -> int:
    """Compare every recording that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="PATH")
    parser.add_argument("--choices", type=Path, metavar="PATH")
    parser.add_argument("--peer", action="store_true", help="run the peer beside us")
    parser.add_argument("--peer-venv", type=Path, default=Path("build/dynamo-venv"))
    parser.add_argument("--only", choices=("conversation", "synthetic"), help="of the traces, with --peer")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16], help="with --peer")
    parser.add_argument("--runs", type=int, default=5, help="of the KV router, with --peer")
    args = parser.parse_args()
    if args.peer:
        python = peer_python(args.peer_venv)
        names = [args.only] if args.only else ["conversation", "synthetic"]
        traces = [args.traces / f"mooncake_{name}.jsonl" for name in names]
        agree = [
            beside_peer(python, trace, workers, args.runs) for trace in traces for workers in args.workers
        ]
        return 0 if all(agree) else 1
    if args.choices is None:
        parser.error("give --choices PATH, or --peer")
    agree = [
        compare(name, args.traces / f"{trace}.jsonl", args.choices / f"{name}.txt.gz", delay_ms)
        for name, (trace, delay_ms) in CASES.items()
        if (args.choices / f"{name}.txt.gz").exists()
    ]
    if not agree:
        print(f"no recordings in {args.choices}", file=sys.stderr)
    return 0 if agree and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
