"""What it costs that workers meet: CPU time of fleets against round robin, and against less, of the same build.

    python benchmarks/fleet_scaling.py --trace PATH [--repeat 3] [--asynchronous] [--large] [--json [FOLDER]]

Every row is a ratio of CPU seconds of one thread, medians of `--repeat` runs of each side in turn, with the goals of
results/. No peer is needed; engines schedule synchronously unless told otherwise (`--asynchronous`).
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

from harness.publish import add_json_flag, publish
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


def cases() -> list[tuple[str, VllmConfig, dict[str, Any], dict[str, Any]]]:
    """Name, engine, what is measured and what it is measured against; goals are in results/."""
    rows: list[tuple[str, VllmConfig, dict[str, Any], dict[str, Any]]] = []
    for how, given in (("least_loaded", {"routing": "least_loaded"}), ("closed loop", {})):
        for workers in (4, 100):
            plain = {"workers": workers}
            load = {} if given else {"load": ClosedLoop(16 * workers)}
            name = f"{how}, {workers} workers, against round robin"
            rows.append((name, ROOMY, {**plain, **given, **load}, plain))
    modes = {"write-through": "write_through", "on eviction": "evict"}
    for name, mode in modes.items():
        for workers in (4, 8, 16):
            plain = {"workers": workers}
            tiered = {**plain, "tiers": tiers(mode)}
            rows.append((f"host tier, {name}, {workers} workers, against none", TIGHT, tiered, plain))
    for workers in (4, 100):
        for name, mode in modes.items():
            own = {"workers": workers, "tiers": tiers(mode)}
            shared = {**own, "tiers": tiers(mode, "g3")}
            rows.append((f"shared G3, {name}, {workers} workers, against G2 alone", TIGHT, shared, own))
    for name, below in TIER_SETS.items():
        own = {"workers": 4} if below is None else {"workers": 4, "tiers": tiers(*below)}
        rows.append((f"--check, {name}", TIGHT, {**own, "check": True}, own))
    large = {"workers": 4}
    rows.append(("--check, no tier, 400,000 blocks of 16", LARGE, {**large, "check": True}, large))
    deep: dict[str, dict[str, Any]] = {
        "no tier": {},
        "closed loop": {"load": ClosedLoop(64)},
        "KV router": {"routing": "kv"},
        "G2": {"tiers": tiers("write_through")},
    }
    for name, how_deep in deep.items():
        own = {"workers": 4, **how_deep}
        rows.append((f"--check deep, {name}", TIGHT, {**own, "check": "deep"}, own))
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
    add_json_flag(parser)
    parser.add_argument("--large-alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large_alone:
        print(json.dumps(large(args.trace)))
        return 0
    workload = read_trace(args.trace)
    fleets: dict[str, dict[str, float]] = {}
    checks: dict[str, dict[str, float]] = {}
    for name, engine, how, base in cases():
        if args.only not in name:
            continue
        engine = msgspec.structs.replace(engine, async_scheduling=args.asynchronous)
        pairs = [
            (cpu_seconds(workload, engine, how), cpu_seconds(workload, engine, base))
            for _ in range(args.repeat)
        ]
        ours, theirs = (median(side) for side in zip(*pairs, strict=True))
        if name.startswith("--check"):
            checks[name] = {"ratio": ours / theirs}
        else:
            fleets[name] = {"ratio": ours / theirs, "time": ours, "against": theirs}
        print(f"{name}: {ours / theirs:.2f}×", flush=True)
    links = {
        f"{workers:,}": {"time of a transfer": median(transfer_us(workers) for _ in range(args.repeat))}
        for workers in (10, 100, 1000)
        if args.only in "transfer"
    }
    measured = {"fleet_scaling": fleets, "check_cost": checks, "link_transfers": links}
    if args.large:
        command = [sys.executable, __file__, "--trace", str(args.trace), "--large-alone"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        measured["large_fleet"] = {"1,000 workers": {"time": found["cpu_s"], "peak": found["peak_gb"]}}
    for name, rows in measured.items():
        if rows:
            publish(name, rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
