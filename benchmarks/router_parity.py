"""The KV-aware router beside Dynamo 1.6.1's: every cost and overlap, with its choices imposed.

    python benchmarks/router_parity.py --traces PATH --choices PATH
    python benchmarks/router_parity.py --traces PATH --peer [--only synthetic] [--runs 5]
    python benchmarks/router_parity.py --traces PATH --queues 1500

PATH holds the Mooncake traces (`mooncake_conversation.jsonl`, `mooncake_synthetic.jsonl`), and what the peer chose: a
line a request in arrival order, `worker cost overlap`, in `dec_NAME.txt.gz`. Engines schedule synchronously, as the
peer's do. With `--peer` the peer runs beside us (installed on first use): round robin must agree in every mean, the KV
router, whose ties each side draws for itself, in means over some runs. With `--queues`, so many requests of the
conversation trace on two workers, under every policy of the router's queue: the order in which requests are released,
and the cost of each, must be the peer's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from harness.publish import add_json_flag, publish
from replay_vs_dynamo import peer_python
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Report
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload, read_trace

CASES = {
    "dec_conversation_4_16384": ("mooncake_conversation", 0.0),
    "dec_synthetic_4_16384": ("mooncake_synthetic", 0.0),
    "dec_syn_lag50": ("mooncake_synthetic", 50.0),
    "dec_syn_lag5000": ("mooncake_synthetic", 5000.0),
}
ENGINE = VllmConfig(
    block_size=64,
    num_gpu_blocks=16384,
    max_num_batched_tokens=8192,
    async_scheduling=False,
    mocker=MockerSettings(charge_first_token=False, route_rejected=True),
)
WORKERS = 4
TOLERANCE = 1e-6
PARITY = (
    ("TTFT", "peer", "difference"),
    ("ITL", "peer's ITL", "difference of ITL"),
    ("hit", "peer's hit", "difference of hits"),
)
"""Columns of the table: ours, the peer's, and their difference in percent."""
Rows = dict[str, dict[str, float]]
"""Numbers by row and column of a table."""


def compare(name: str, trace: Path, choices: Path, delay_ms: float) -> tuple[int, int]:
    """Print one line; return how many decisions agree in cost and overlap, of how many."""
    with gzip.open(choices, "rt") as file:
        peer = np.loadtxt(file)
    workload = read_trace(trace)
    router = KvRouting(event_delay_ms=delay_ms).build(imposed=peer[:, 0].astype(np.int32))
    timeline = run_offline(RunPlan(workload, ENGINE, workers=WORKERS, routing=router)).timeline
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
    return int((~(costs | overlaps)).sum()), len(peer)


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


def beside_peer(python: Path, trace: Path, workers: int, runs: int, rows: Rows) -> bool:
    """Round robin once, the KV router some times on both sides; adds rows. True when all that must agree does."""
    workload, fine = read_trace(trace), True
    for mode, count in (("round_robin", 1), ("kv_router", runs)):
        sides: dict[str, list[list[float]]] = {"ours": [], "peer": []}
        for seed in range(count):
            routing: Any = "round_robin" if mode == "round_robin" else KvRouting()
            run = run_offline(RunPlan(workload, ENGINE, workers=workers, routing=routing, seed=seed))
            report = Report.build(run.timeline, run.facts)
            hit = report.prefix_hit_ratio.first_admission
            sides["ours"].append([report.ttft_ms.mean or 0, report.itl_ms.mean or 0, hit or 0])
            command = [str(python), "-c", PEER_RUN, str(trace), str(workers), mode]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            sides["peer"].append(json.loads(output.strip().splitlines()[-1]))
        ours, peer = (np.mean(sides[side], axis=0) for side in ("ours", "peer"))
        apart = np.abs(ours / peer - 1)
        limits = [1e-4] * 3 if mode == "round_robin" else [0.01, np.inf, 0.03]
        router = "round robin" if mode == "round_robin" else "kv"
        row = rows[f"{trace.stem.removeprefix('mooncake_')}, {workers}, {router}"] = {}
        for (mine, theirs, difference), a, b, d in zip(PARITY, ours, peer, apart, strict=True):
            row |= {mine: float(a), theirs: float(b)} | (
                {difference: 100 * float(d)} if router == "kv" else {}
            )
        fine = fine and bool((apart <= limits).all())
    return fine


PEER_QUEUE = """
import json, sys
import dynamo.replay
from dynamo._core import KvRouterConfig
trace, threshold, policy = sys.argv[1], float(sys.argv[2]), sys.argv[3]
report = dynamo.replay.run_trace_replay([trace], extra_engine_args={"engine": {"block_size": 64,
    "num_gpu_blocks": 16384}}, num_workers=2, router_mode="kv_router", trace_block_size=512,
    router_config=KvRouterConfig(router_queue_threshold=threshold, router_queue_policy=policy))
summary = report if isinstance(report, dict) else report.summary
print((summary if isinstance(summary, dict) else vars(summary))["mean_ttft_ms"])
"""
SELECTED = re.compile(r"Selected worker.* worker_id=(\d+) .*logit=([\d.]+)")


def queues(python: Path, trace: Path, requests: int, rows: Rows) -> bool:
    """Whether requests leave the router's queue in the peer's order, each at its cost; adds rows of mean TTFTs."""
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.jsonl"
        part.write_text("".join(trace.read_text().splitlines(keepends=True)[:requests]))
        workload = read_trace(part)
        for policy in ("fcfs", "lcfs", "wspt"):
            for threshold in (1.0, 0.0):
                costs, peer_ms = peer_queue(python, part, threshold, policy)
                same, ttft_ms = max(our_queue(workload, threshold, policy, seed, costs) for seed in range(4))
                row = rows.setdefault(f"2, {threshold:g}", {})
                row |= {f"{policy}, ours": ttft_ms / 1e3, f"{policy}, peer": peer_ms / 1e3}
                print(
                    f"{policy} above {threshold:g}: {same:,} of {len(costs):,} at the peer's cost", flush=True
                )
                fine = fine and same == len(costs)
    return fine


def our_queue(workload: Workload, threshold: float, policy: Any, seed: int, costs: Any) -> tuple[int, float]:
    """How many decisions have the peer's cost, and the mean TTFT. A tie or two is drawn, there as here."""
    routing = KvRouting(queue_threshold=threshold, queue_policy=policy)
    run = run_offline(RunPlan(workload, ENGINE, workers=2, routing=routing, seed=seed))
    assert run.decisions is not None
    same = int((np.abs(run.decisions.cost - costs) < TOLERANCE).sum())
    return same, Report.build(run.timeline, run.facts).ttft_ms.mean or 0


def peer_queue(python: Path, trace: Path, threshold: float, policy: str) -> tuple[Any, float]:
    """Costs in the order of its decisions, as its log has them, and its mean TTFT.

    Where steps of both workers end at one moment it takes them by number, we by who has the earliest request: of its
    runs, whose first tie is drawn, one counts in which these are the same.
    """
    while True:
        command = [str(python), "-c", PEER_QUEUE, str(trace), str(threshold), policy]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        log = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
        chosen = np.array([(float(worker), float(cost)) for worker, cost in SELECTED.findall(log)])
        if chosen[0, 0] == 0:
            return chosen[:, 1], float(done.stdout.strip().splitlines()[-1])


def main() -> int:
    """Compare every recording that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, metavar="PATH")
    parser.add_argument("--choices", type=Path, metavar="PATH")
    parser.add_argument("--peer", action="store_true", help="run the peer beside us")
    parser.add_argument("--queues", type=int, metavar="N", help="compare queues over so many requests")
    parser.add_argument("--peer-venv", type=Path, default=Path("build/dynamo-venv"))
    parser.add_argument("--only", choices=("conversation", "synthetic"), help="of the traces, with --peer")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16], help="with --peer")
    parser.add_argument("--runs", type=int, default=5, help="of the KV router, with --peer")
    add_json_flag(parser)
    args = parser.parse_args()
    rows: Rows = {}
    if args.queues:
        trace = args.traces / "mooncake_conversation.jsonl"
        fine = queues(peer_python(args.peer_venv), trace, args.queues, rows)
        publish("router_queues", rows, args.json)
        return 0 if fine else 1
    if args.peer:
        python = peer_python(args.peer_venv)
        names = [args.only] if args.only else ["conversation", "synthetic"]
        traces = [args.traces / f"mooncake_{name}.jsonl" for name in names]
        agree = [
            beside_peer(python, trace, workers, args.runs, rows)
            for trace in traces
            for workers in args.workers
        ]
        publish("router_parity", rows, args.json)
        return 0 if all(agree) else 1
    if args.choices is None:
        parser.error("give --choices PATH, or --peer")
    counts = [
        compare(name, args.traces / f"{trace}.jsonl", args.choices / f"{name}.txt.gz", delay_ms)
        for name, (trace, delay_ms) in CASES.items()
        if (args.choices / f"{name}.txt.gz").exists()
    ]
    if not counts:
        print(f"no recordings in {args.choices}", file=sys.stderr)
        return 1
    equal, decisions = (sum(side) for side in zip(*counts, strict=True))
    publish("router_choices", {"recorded decisions": {"equal": equal, "of": decisions}}, args.json)
    return 0 if equal == decisions else 1


if __name__ == "__main__":
    sys.exit(main())
