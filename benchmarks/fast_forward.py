"""Measure what fast-forward saves: CPU time of runs with it and without, for each way in which a run advances workers.

    python benchmarks/fast_forward.py --trace PATH [--repeat 3] [--json [FOLDER]]

A ratio is CPU seconds of one thread without fast-forward over those with it: medians of `--repeat` runs of each side in
turn. Both sides must have the same digest. The first word of a row is the mode that `Fleet::choose_mode` picks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness.publish import add_json_flag, publish
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, Workload, read_trace

SYNCHRONOUS = VllmConfig(
    block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192, async_scheduling=False
)
ASYNCHRONOUS = VllmConfig(block_size=64, num_gpu_blocks=16384, max_num_batched_tokens=8192)
LINK = {"down_gbps": 25, "up_gbps": 25}
DISK_LINK = {"down_gbps": 6, "up_gbps": 6, "backend_down_gbps": 40, "backend_up_gbps": 40}
HOST = {"tier": "g2", "blocks": 65536, "link": LINK}
DISK = {"tier": "g3", "blocks": 400_000, "link": DISK_LINK}


def tiers(mode: str, *below: dict[str, Any]) -> TiersConfig:
    """A host, and what is shared below it."""
    return TiersConfig.from_dict(
        {"kv_bytes_per_token": 131072, "tiers": [HOST, *below], "offload": {"mode": mode}}
    )


CASES: dict[str, tuple[VllmConfig, dict[str, Any]]] = {
    "Independent: round robin": (SYNCHRONOUS, {}),
    "Independent: round robin, asynchronous": (ASYNCHRONOUS, {}),
    "Independent: host, write through": (SYNCHRONOUS, {"tiers": tiers("write_through")}),
    "Independent: host, on eviction": (SYNCHRONOUS, {"tiers": tiers("evict")}),
    "Independent: vLLM's host": (ASYNCHRONOUS, {"tiers": tiers("vllm")}),
    "Lookahead: closed loop": (SYNCHRONOUS, {"load": ClosedLoop(64)}),
    "Lookahead: least_loaded": (SYNCHRONOUS, {"routing": "least_loaded"}),
    "Lookahead: least_loaded, asynchronous": (ASYNCHRONOUS, {"routing": "least_loaded"}),
    "Lookahead: kv": (SYNCHRONOUS, {"routing": "kv"}),
    "Lookahead: kv, host": (SYNCHRONOUS, {"routing": "kv", "tiers": tiers("write_through")}),
    "Stepwise: shared disk, write through": (SYNCHRONOUS, {"tiers": tiers("write_through", DISK)}),
}


def measure(workload: Workload, engine: VllmConfig, how: dict[str, Any], repeat: int) -> dict[str, float]:
    """Run both sides in turn; SystemExit when their results differ."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    digests = set()
    for _ in range(repeat):
        for fast_forward, times in seconds.items():
            begin = time.process_time()
            run = run_offline(RunPlan(workload, engine, workers=4, fast_forward=fast_forward, **how))
            times.append(time.process_time() - begin)
            digests.add(run.facts.digest)
    if len(digests) != 1:
        sys.exit("the result differs with and without fast-forward")
    on, off = median(seconds[True]), median(seconds[False])
    return {"on": on, "off": off, "off / on": off / on}


def main() -> None:
    """Measure all cases, or those that `--only` names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a row's name")
    add_json_flag(parser)
    given = parser.parse_args()
    workload = read_trace(given.trace)
    measured = {
        name: measure(workload, engine, how, given.repeat)
        for name, (engine, how) in CASES.items()
        if given.only in name
    }
    publish("fast_forward", measured, given.json)


if __name__ == "__main__":
    main()
