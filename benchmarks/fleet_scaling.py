"""What it costs that workers meet: CPU time of fleets against round robin, and against less, of the same build.

    python benchmarks/fleet_scaling.py --trace PATH [--repeat 3] [--asynchronous] [--large] [--json PATH]

Every row is a ratio of CPU seconds of one thread, medians of `--repeat` runs of each side in turn, with the goal that
the project has set itself. No peer is needed; engines schedule synchronously unless told otherwise (`--asynchronous`).
`--large` adds 1,000 workers with a shared disk and object store on ten copies of the trace, with its peak of memory, in
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import Links, TiersConfig
from understudy.workload import ClosedLoop, Workload, read_trace, repeat

ROOMY = VllmConfig(block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192, async_scheduling=False)
TIGHT = VllmConfig(block_size=64, num_gpu_blocks=4096, max_num_batched_tokens=8192, async_scheduling=False)
LARGE = VllmConfig(block_size=16, num_gpu_blocks=400_000, max_num_batched_tokens=8192, async_scheduling=False)


def tiers(mode: str, *below: str) -> TiersConfig:
    """A host of 65,536 blocks at 25 GB/s, and what is shared below it."""
    link = {"down_gbps": 6, "up_gbps": 6, "backend_down_gbps": 40, "backend_up_gbps": 40}
    shared = [{"tier": tier, "blocks": 400_000, "link": link} for tier in below]
    host = {"tier": "g2", "blocks": 65536, "link": {"down_gbps": 25, "up_gbps": 25}}
    return TiersConfig.from_dict(
        {"kv_bytes_per_token": 131072, "tiers": [host, *shared], "offload": {"mode": mode}}
    )


TIER_SETS: dict[str, tuple[str, ...] | None] = {
    "no tier": None,
    "G2": ("write_through",),
    "G2 on eviction": ("evict",),
    "G2, G3": ("write_through", "g3"),
    "G2, G3 on eviction": ("evict", "g3"),
    "G2, G4": ("write_through", "g4"),
    "G2, G3, G4": ("write_through", "g3", "g4"),
    "G2, G3, G4 on eviction": ("evict", "g3", "g4"),
    "vLLM's host": ("vllm",),
}
"""Mode of offload, and what the workers share below their hosts."""


def cases() -> list[tuple[str, float, VllmConfig, dict[str, Any], dict[str, Any]]]:
    """Name, goal, engine, what is measured and what it is measured against."""
    rows: list[tuple[str, float, VllmConfig, dict[str, Any], dict[str, Any]]] = []
    for workers, goal in ((4, 1.5), (100, 2.0)):
        plain = {"workers": workers}
        rows.append((f"least_loaded, {workers}", goal, ROOMY, {**plain, "routing": "least_loaded"}, plain))
        rows.append(
            (f"closed loop, {workers}", goal, ROOMY, {**plain, "load": ClosedLoop(16 * workers)}, plain)
        )
    for workers in (4, 8, 16):
        for mode, goals in (("write_through", (2.2, 2.0, 2.0)), ("evict", (2.5, 2.2, 2.2))):
            plain = {"workers": workers}
            goal = goals[(4, 8, 16).index(workers)]
            rows.append((f"{mode}, {workers}", goal, TIGHT, {**plain, "tiers": tiers(mode)}, plain))
    for workers in (4, 100):
        for mode in ("write_through", "evict"):
            own = {"workers": workers, "tiers": tiers(mode)}
            rows.append(
                (f"shared G3, {mode}, {workers}", 2.2, TIGHT, {**own, "tiers": tiers(mode, "g3")}, own)
            )
    for name, below in TIER_SETS.items():
        own = {"workers": 4} if below is None else {"workers": 4, "tiers": tiers(*below)}
        rows.append((f"--check, {name}", 30.0, TIGHT, {**own, "check": True}, own))
    deep: dict[str, dict[str, Any]] = {
        "no tier": {},
        "closed loop": {"load": ClosedLoop(64)},
        "KV router": {"routing": "kv"},
        "G2": {"tiers": tiers("write_through")},
    }
    for name, how in deep.items():
        own = {"workers": 4, **how}
        rows.append((f"deep check, {name}", 40.0, TIGHT, {**own, "check": "deep"}, own))
    rows.append(("--check, large device", 30.0, LARGE, {"workers": 4, "check": True}, {"workers": 4}))
    return rows


def cpu_seconds(workload: Workload, engine: VllmConfig, how: dict[str, Any]) -> float:
    """Of one run."""
    started = time.process_time()
    run_offline(RunPlan(workload, engine, **how))
    return time.process_time() - started


def transfer_us(workers: int, transfers: int = 4000) -> float:
    """CPU time of a transfer over a worker's link and a backend's, while every worker has one under way."""
    links = Links()
    own = [links.add_link(f"worker {i}", 6.0) for i in range(workers)]
    backend = links.add_link("backend", 40.0)
    size = 32 * 64 * 131072
    for i in range(workers):
        links.start(0, [own[i], backend], size + 1000 * i)
    owner = dict(enumerate(own))
    started = time.process_time()
    for _ in range(transfers):
        due = links.next_completion_ns()
        assert due is not None
        for now_ns, ended in links.pop_due(due):
            link = owner.pop(ended)
            owner[links.start(now_ns, [link, backend], size)] = link
    return 1e6 * (time.process_time() - started) / transfers


def large(trace: Path) -> dict[str, float]:
    """1,000 workers that share G3 and G4, on ten copies of the trace."""
    workload = repeat(read_trace(trace), 10)
    seconds = cpu_seconds(workload, TIGHT, {"workers": 1000, "tiers": tiers("write_through", "g3", "g4")})
    return {"cpu_s": seconds, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--asynchronous", action="store_true", help="engines schedule a batch ahead")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="write the numbers")
    parser.add_argument("--large-alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large_alone:
        print(json.dumps(large(args.trace)))
        return 0
    workload = read_trace(args.trace)
    table = Table("", "ratio", "goal", "CPU s", "against")
    numbers: dict[str, Any] = {}
    for name, goal, engine, how, base in cases():
        if args.only not in name:
            continue
        engine = msgspec.structs.replace(engine, async_scheduling=args.asynchronous)
        pairs = [
            (cpu_seconds(workload, engine, how), cpu_seconds(workload, engine, base))
            for _ in range(args.repeat)
        ]
        ours, theirs = (median(side) for side in zip(*pairs, strict=True))
        numbers[name] = {"ratio": ours / theirs, "goal": goal, "cpu_s": ours, "against_s": theirs}
        table.add_row(name, f"{ours / theirs:.2f}", f"≤ {goal}", f"{ours:.3f}", f"{theirs:.3f}")
    for workers in (10, 100, 1000):
        if args.only not in "transfer":
            continue
        cost = median(transfer_us(workers) for _ in range(args.repeat))
        numbers[f"transfer, {workers}"] = {"us": cost, "goal": 40}
        table.add_row(f"transfer, {workers}", "", "≤ 40 µs", f"{cost:.1f} µs", "")
    if args.large:
        command = [sys.executable, __file__, "--trace", str(args.trace), "--large-alone"]
        numbers["large"] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        measured = numbers["large"]
        table.add_row(
            "1,000 workers, 10×",
            "",
            "≤ 120 s, 3 GB",
            f"{measured['cpu_s']:.1f}",
            f"{measured['peak_gb']:.2f} GB",
        )
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
