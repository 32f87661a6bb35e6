"""What a scaler costs and what it saves: a burst of ten times the load, under each built-in scaler.

    python benchmarks/scalers.py [--workers 4 16 64] [--svg docs/scalers.svg] [--json [FOLDER]]

The burst lasts for five minutes, on fleets of at most 4 to 64 workers; and the shorter one of docs/elastic.md, with
static fleets of 1 to 8 workers and a schedule that knows the load, which `--svg` draws as cost against goodput. A good
request has its first token within 2 s. CPU seconds are those of one replay on one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.publish import add_json_flag, publish
from harness.scaler_picture import draw
from understudy import VllmConfig
from understudy.run.autoscale import Autoscale
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.run.offline import OfflineRun

PROMPT, ANSWER, BLOCK = 2048, 256, 64
ENGINE = VllmConfig(
    block_size=BLOCK,
    num_gpu_blocks=1024,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=32768,
    async_scheduling=False,
)
STARTUP_S = 20.0
GOOD_NS = 2_000_000_000
SCALERS = {
    "dynamo-load": "dynamo-load",
    "dynamo-sla": "dynamo-sla,ttft_ms=2000,itl_ms=50",
    "hpa": "hpa,metric=kv_use,target=0.7",
    "wva": "wva",
    "backlog": "backlog",
}
PER_WORKER = 2.0
"""Requests per second of the burst, for each worker that the fleet may have."""
LEAST_REQUESTS = 1000
"""A load with fewer is the short burst."""
SHORT = ((30, 1.0), (60, 8.0), (150, 1.0))
"""The burst of docs/elastic.md: seconds and requests per second."""


class Measured(NamedTuple):
    """A replay of a burst."""

    mean_ttft_ms: float
    p99_ttft_ms: float
    gpu_s: float
    good: float
    good_per_gpu_hour: float
    cpu_s: float

    def numbers(self) -> dict[str, float]:
        """Return the numbers by column."""
        return {
            "mean TTFT": self.mean_ttft_ms,
            "p99 TTFT": self.p99_ttft_ms,
            "GPU time": self.gpu_s,
            "good requests": 100 * self.good,
            "good per GPU-hour": self.good_per_gpu_hour,
            "CPU time": self.cpu_s,
        }


def make_load(phases: Sequence[tuple[float, float]]) -> Workload:
    """Return requests at these rates, in phases of seconds and requests per second; prompts share nothing."""
    arrivals: list[float] = []
    start_s = 0.0
    for seconds, rate in phases:
        arrivals += [start_s + at / rate for at in range(round(seconds * rate))]
        start_s += seconds
    rows, blocks = len(arrivals), PROMPT // BLOCK
    return Workload(
        arrival_ns=np.round(np.array(arrivals) * 1e9).astype(np.int64),
        prompt_tokens=np.full(rows, PROMPT, np.int32),
        output_tokens=np.full(rows, ANSWER, np.int32),
        hash_ids=np.arange(rows * blocks, dtype=np.uint32),
        hash_offsets=np.arange(rows + 1, dtype=np.int64) * blocks,
        trace_block_size=BLOCK,
    )


def replay(load: Workload, workers: int, autoscale: Autoscale | None = None) -> Measured:
    """Replay a load and measure it. Requests of the short burst go round robin, as in docs/elastic.md."""
    routing: Any = "round_robin" if len(load) < LEAST_REQUESTS else "least_loaded"
    began_s = time.process_time()
    run = run_offline(RunPlan(load, ENGINE, workers=workers, autoscale=autoscale, routing=routing))
    return measure(run, workers, time.process_time() - began_s)


def measure(run: OfflineRun, workers: int, cpu_s: float) -> Measured:
    """Return the numbers of a run; a static fleet has its GPUs for all of it."""
    line = run.timeline
    ttft = line.first_token_ns - line.arrival_ns
    gpu_ns = workers * line.end_ns if line.lives is None else line.lives.paid_ns(line.end_ns)
    good = int((line.completed & (ttft <= GOOD_NS)).sum())
    return Measured(
        float(ttft.mean()) / 1e6,
        float(np.quantile(ttft, 0.99)) / 1e6,
        gpu_ns / 1e9,
        good / len(ttft),
        good / (gpu_ns / 3.6e12),
        cpu_s,
    )


def find_schedule(
    load: Workload, phases: Sequence[tuple[float, float]], most: int, folder: Path
) -> tuple[int, Autoscale]:
    """Return the workers at the start and a schedule that knows the load.

    It has enough workers for the base load and, from the burst's first second to its last, for the burst: the fewest
    whose requests are good, found by replays of static fleets.
    """
    base = fewest(make_load(phases[:1]), most)
    peak = fewest(load, most)
    start_s = phases[0][0]
    end_s = start_s + phases[1][0]
    lines = [
        {"at_s": 0, "workers": base},
        {"at_s": start_s - STARTUP_S, "workers": peak},
        {"at_s": end_s, "workers": base},
    ]
    path = folder / f"schedule-{most}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return base, Autoscale(scaler=f"schedule,file={path}", startup_s=STARTUP_S, max_workers=most)


def fewest(load: Workload, most: int) -> int:
    """Return the fewest workers of which 99 % of the requests are good; `most` if none are."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if replay(load, middle).good >= 0.99:
            high = middle
        else:
            low = middle + 1
    return low


def measure_scalers(
    phases: Sequence[tuple[float, float]], start: int, most: int, folder: Path
) -> dict[str, Measured]:
    """Replay a burst under every built-in scaler."""
    load = make_load(phases)
    found = {
        name: replay(
            load, start, Autoscale(scaler=scaler, startup_s=STARTUP_S, max_workers=most, min_workers=1)
        )
        for name, scaler in SCALERS.items()
    }
    base, schedule = find_schedule(load, phases, most, folder)
    return {**found, "schedule that knows the load": replay(load, base, schedule)}


def main() -> None:
    """Print the table, and draw the picture if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 16, 64], metavar="N")
    parser.add_argument("--svg", type=Path, metavar="PATH")
    add_json_flag(parser)
    args = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        short = measure_scalers(SHORT, 1, 8, Path(folder))
        static = {workers: replay(make_load(SHORT), workers) for workers in range(1, 9)}
        rows |= {f"short burst, {name}": one.numbers() for name, one in short.items()}
        rows |= {f"short burst, static fleet of {workers}": one.numbers() for workers, one in static.items()}
        for most in args.workers:
            rate = PER_WORKER * most
            phases = ((120.0, rate / 10), (300.0, rate), (180.0, rate / 10))
            found = measure_scalers(phases, max(1, most // 8), most, Path(folder))
            rows |= {f"at most {most} workers, {name}": one.numbers() for name, one in found.items()}
    publish("scalers", rows, args.json)
    if args.svg:
        args.svg.write_text(
            draw(
                {name: (one.gpu_s, 100 * one.good) for name, one in short.items()},
                {workers: (one.gpu_s, 100 * one.good) for workers, one in static.items()},
            ),
            encoding="utf-8",
        )
        print(f"\nwritten: {args.svg}")


if __name__ == "__main__":
    main()
