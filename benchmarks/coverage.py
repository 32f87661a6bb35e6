"""How often the truth lies within the uncertainty that `understudy calibrate` states.

    python benchmarks/coverage.py --seeds 40

Benchmarks are simulated with numbers that are known: each is drawn about its preset, those that a fit moves and those
that it leaves alone; what is measured is off by some percent, as a benchmark that is run again is. Lengths of a summary
are drawn anew, since it does not have them. Then they are fitted, and the table says in how many fits the truth was
within one and two of the stated standard deviations, and how often a number was said to be determined.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.progress import track

from harness.publish import add_json_flag, publish
from understudy.calibrate.benchmark import DRAWS, Benchmark
from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.fit import NOT_FITTED, fit, select_parameters
from understudy.calibrate.load import Load, build_load, random_lengths
from understudy.calibrate.measured_run import RUN_TO_RUN
from understudy.calibrate.simulate import simulate
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.physical import Physical
from understudy.timing.presets import preset

if TYPE_CHECKING:
    from understudy.timing.efficiencies import Efficiencies

FLAGS = EngineFlags(max_num_seqs=64, max_num_batched_tokens=4096)
DEPLOYMENTS = {
    "dense": Deployment(model=find_architecture("Llama-3.1-8B"), gpu=find_gpu("H100"), weights="bf16"),
    "experts": Deployment(
        model=find_architecture("gpt-oss-120b"),
        gpu=find_gpu("H100"),
        weights="mxfp4",
        parallel=Parallelism(tensor=2),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=["summaries", "every request"])
    add_json_flag(parser)
    args = parser.parse_args()
    measured: dict[str, dict[str, float]] = {}
    began, fits = time.process_time(), 0
    for model, deployment in DEPLOYMENTS.items():
        for kind in ("summaries", "every request"):
            if args.only not in (None, kind):
                continue
            found: dict[str, list[tuple[float, bool, float]]] = defaultdict(list)
            for seed in track(range(args.first, args.first + args.seeds), f"{model}, {kind}"):
                fits += 1
                for name, row in study(deployment, kind, seed).items():
                    found[name].append(row)
            for name, rows in found.items():
                off, said, wide = (np.array(column) for column in zip(*rows, strict=True))
                measured[f"{model}, {kind}: {name}"] = {
                    "within 1 σ": 100 * float((np.abs(off) < 1).mean()),
                    "within 2 σ": 100 * float((np.abs(off) < 2).mean()),
                    "worst": float(np.abs(off).max()),
                    "determined": 100 * float(said.mean()),
                    "σ, median": 100 * float(np.median(wide)),
                }
    publish("coverage", measured, args.json)
    print(f"{(time.process_time() - began) / fits:.1f} s of CPU a fit")


def study(deployment: Deployment, kind: str, seed: int) -> dict[str, tuple[float, bool, float]]:
    """Of each number that was fitted: by how many standard deviations it is off, whether it was said to be
    determined, and the standard deviation."""
    draw = np.random.default_rng(seed)
    start = preset(deployment.model, deployment.gpu, deployment.weights, deployment.kv).efficiencies
    loads = summaries(seed) if kind == "summaries" else [every_request(draw)]
    blank = [Benchmark(file="", format="", sha256="", load=load, means={}) for load in loads]
    wanted = select_parameters(deployment, blank, detailed=kind != "summaries")
    truth = drawn(start, {**NOT_FITTED, **wanted}, draw)
    benchmarks = [measured(load, deployment, truth, draw, kind) for load in loads]
    if kind == "summaries":  # what a reader makes of one
        draws = [summaries(seed + 10_000 * (1 + draw)) for draw in range(DRAWS)]
        benchmarks = [
            msgspec.structs.replace(one, load=load, other_draws=tuple(others))
            for one, load, *others in zip(benchmarks, *draws, strict=True)
        ]
    return {
        number.name: (
            float(np.log(number.value / getattr(truth, number.name))) / (number.plus_minus_percent / 100),
            number.determined,
            number.plus_minus_percent / 100,
        )
        for number in fit(benchmarks, deployment, start, FLAGS).file.fitted
    }


def drawn(start: Efficiencies, spreads: dict[str, float], draw: np.random.Generator) -> Efficiencies:
    """Numbers about those, as far away as they may be."""
    moved = {
        name: getattr(start, name) * float(np.exp(spread * draw.standard_normal()))
        for name, spread in spreads.items()
    }
    if "mixed_kv_factor" in moved:
        moved["mixed_kv_factor"] = max(moved["mixed_kv_factor"], 1.0)
    return msgspec.structs.replace(start, **moved)


def summaries(seed: int) -> list[Load]:
    """Short prompts at low and high concurrency, long ones in the middle."""
    shapes = ((1024, 256, 4), (1024, 256, 48), (3000, 128, 16))
    return [
        random_lengths(isl, osl, least=0.8, concurrency=slots, prompts=10 * slots, seed=seed)
        for isl, osl, slots in shapes
    ]


def every_request(draw: np.random.Generator) -> Load:
    """A hundred requests at random times."""
    rows = 100
    return build_load(
        draw.integers(200, 3000, rows),
        draw.integers(20, 120, rows),
        arrival_s=np.cumsum(draw.exponential(1 / 12, rows)),
    )


def measured(
    load: Load, deployment: Deployment, truth: Efficiencies, draw: np.random.Generator, kind: str
) -> Benchmark:
    """What a client would have seen, off by what a benchmark is off when it is run again."""
    engine = build_engine_config(
        deployment,
        max_num_seqs=FLAGS.max_num_seqs,
        max_num_batched_tokens=FLAGS.max_num_batched_tokens,
        enable_prefix_caching=True,
    )
    timing = Physical(coefficients=deployment.coefficients(truth))
    seen = simulate(load, msgspec.structs.replace(engine, timing=timing), front_end_ms=truth.front_end_ms)
    off = {name: float(np.exp(spread * draw.standard_normal())) for name, spread in RUN_TO_RUN.items()}
    means = {name: seen.mean(name) * factor for name, factor in off.items()}
    every = {name: getattr(seen, name) * factor for name, factor in off.items()}
    if kind == "summaries":
        means.pop("e2e_ms")
        every = {}
    return Benchmark(file=kind, format=kind, sha256="", load=load, means=means, **every)


if __name__ == "__main__":
    main()
