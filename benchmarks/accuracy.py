"""How far simulated times are from measured ones, beside what others reach on the same kind of data.

    python benchmarks/accuracy.py --data PATH

PATH holds `silicon_fit.csv`, `blis_fit.csv` and `llmservingsim/` (docs/accuracy.md says what they are). Every number
comes from the engine that `understudy replay` runs. `--calibrate` also fits each deployment to three of its rows and
scores the others; `--halves` fits to the first half of recorded runs and scores the second; `--refit` fits the numbers
of each family anew to a part of its rows, from the same round numbers for all, and scores the rows that it did not see.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table as Grid

from understudy.calibrate.benchmark import Benchmark
from understudy.calibrate.experiment import engine_for
from understudy.calibrate.fit import EngineFlags, fit
from understudy.calibrate.least_squares import solve
from understudy.calibrate.load import requests
from understudy.calibrate.predict import predict_table
from understudy.calibrate.recorded import predict_run
from understudy.calibrate.tables import Table
from understudy.timing.architecture import Architecture
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.gpus import find_gpu
from understudy.timing.physical import Physical
from understudy.timing.presets import preset
from understudy.timing.sources import MeasuredKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.calibrate.experiment import Experiment

# What must be reached on rows that nobody has seen, and what the best peer shows on the same kind of data.
BARS = {
    ("dense 70B", "TPOT"): ("4 %, 12 %", "AIConfigurator 0.12: 4-13 %"),
    ("dense 70B", "TTFT"): ("10 %, 25 %", "AIConfigurator 0.12: 18-43 %"),
    ("gpt-oss", "TPOT"): ("8-12 %", "not covered by AIConfigurator"),
    ("gpt-oss", "TTFT"): ("12-20 %", "not covered by AIConfigurator"),
    ("MiniMax", "TPOT"): ("8-12 %", "AIConfigurator 0.12: 13-18 %"),
    ("MiniMax", "TTFT"): ("12-20 %", "AIConfigurator 0.12: 31-37 %"),
    ("BLIS dense", "ITL"): ("4-5 %", "BLIS 6 %, others 13 % or more"),
    ("BLIS dense", "E2E"): ("4-5 %", "BLIS 6 %, others 13 % or more"),
    ("BLIS dense", "TTFT"): ("9 %", "BLIS 13-20 %, others 600 % or more"),
    ("BLIS experts", "ITL"): ("4-10 %", "as above"),
    ("BLIS experts", "E2E"): ("4-10 %", "as above"),
    ("BLIS experts", "TTFT"): ("9 %", "as above"),
}
STRATA = {"Llama-3.1-70B": "dense 70B", "gpt-oss-120b": "gpt-oss", "MiniMax-M2.5": "MiniMax"}
RUNS = {
    "RTX4090/Llama-3.1-8B": ("RTX 4090", 256, 2587, (0.6, 0.2, 0.5)),
    "RTXPRO6000/Llama-3.1-8B": ("RTX PRO 6000", 128, None, (-4.0, -1.0, -1.8)),
    "RTXPRO6000/Qwen3-30B-A3B-Instruct-2507": ("RTX PRO 6000", 128, None, (-13.6, -1.7, -2.2)),
}
PROMPTS = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b"}
VERSION = "0.19.0"
"""GPU, max_num_seqs, usable blocks where recorded, and what LLMServingSim shows: TTFT, TPOT, E2E in percent."""
RANKS = {"Qwen3-30B-A3B-Instruct-2507": Parallelism(data=2, expert=2)}
OWNERS = {"Llama-3.1-8B": "meta-llama", "Qwen3-30B-A3B-Instruct-2507": "Qwen"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--runs", action="store_true", help="recorded runs alone")
    parser.add_argument(
        "--only", choices=sorted(set(STRATA.values())), help="of --calibrate: one family, and no tables"
    )
    parser.add_argument(
        "--refit",
        nargs="?",
        const="",
        metavar="FAMILY",
        help="fit families (those whose name has this in it) anew to part of their rows, score the others; alone",
    )
    args = parser.parse_args()
    console = Console(width=140, highlight=False)
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    closed = Table.read(args.data / "silicon_fit.csv")
    if args.refit is not None:
        console.print(_refitted(closed, args.refit))
        return
    if args.runs:
        console.print(_runs(args.data / "llmservingsim" / "runs"))
        return
    if args.only:
        console.print(_calibrated(closed, args.only))
        return
    _closed_loops(closed, errors)
    _stages(Table.read(args.data / "blis_fit.csv"), errors)
    console.print(_table("presets on the fit set: median and p90 of |predicted / measured - 1|", errors))
    console.print(_runs(args.data / "llmservingsim" / "runs"))
    if args.calibrate:
        console.print(_calibrated(closed))
    if args.halves:
        console.print(_halves(args.data / "llmservingsim" / "runs"))


def _predicted(table: Table) -> list[dict[str, float]]:
    found = []
    for result in predict_table(table):
        if not isinstance(result, dict):
            raise result
        found.append(result)
    return found


def _closed_loops(table: Table, errors: dict[tuple[str, str, str], list[float]]) -> None:
    for index, found in enumerate(_predicted(table)):
        one = table.experiment(index)
        group = STRATA[one.deployment.model.name]
        for where in (f"{one.deployment.gpu.name} {one.deployment.weights}", "all"):
            errors[group, where, "TPOT"].append(found["tpot_ms"] / one.measurement("tpot_ms") - 1)
            errors[group, where, "TTFT"].append(found["ttft_ms"] / one.measurement("ttft_ms") - 1)


def _stages(table: Table, errors: dict[tuple[str, str, str], list[float]]) -> None:
    for index, found in enumerate(_predicted(table)):
        one = table.experiment(index)
        group = "BLIS experts" if one.deployment.model.num_experts else "BLIS dense"
        for where in (one.deployment.gpu.name, "all"):
            for name, key in (("ITL", "itl_ms"), ("E2E", "e2e_ms"), ("TTFT", "ttft_ms")):
                errors[group, where, name].append(found[key] / one.measurement(key) - 1)


def _table(title: str, errors: dict[tuple[str, str, str], list[float]]) -> Grid:
    grid = Grid(title=title, title_justify="left")
    for name in (
        "data",
        "where",
        "rows",
        "measure",
        "median",
        "p90",
        "bias",
        "must reach unseen",
        "best peer",
    ):
        grid.add_column(name, justify="right" if name in ("rows", "median", "p90", "bias") else "left")
    for (group, where, measure), values in sorted(errors.items()):
        sizes = np.abs(values)
        must, peer = BARS.get((group, measure), ("", "")) if where == "all" else ("", "")
        grid.add_row(
            group,
            where,
            str(len(values)),
            measure,
            f"{np.median(sizes):.1%}",
            f"{np.quantile(sizes, 0.9):.1%}",
            f"{np.median(values):+.1%}",
            must,
            peer,
        )
    return grid


# --- recorded runs --------------------------------------------------------------------------------------


def _recorded(folder: Path, *, prompts: bool) -> Benchmark:
    """A recorded run. Its arrivals are of another clock: they are shifted by the least wait that was seen.

    `prompts`: with the tokens of its prompts, which have prefixes in common, as the engine saw them.
    """
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    tokens = None
    if prompts:
        name = f"sharegpt-{PROMPTS[folder.name]}-300-sps10.jsonl.gz"
        with gzip.open(folder.parents[2] / "workloads" / name, "rt", encoding="utf-8") as file:
            tokens = [json.loads(line)["input_tok_ids"] for line in file]
        if [len(prompt) for prompt in tokens] != [row["input_toks"] for row in rows]:
            raise SystemExit(f"{folder}: requests are not those of {name}")
    shift = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    arrival = np.array([row["arrival_time"] for row in rows])
    first, last = (np.array([row[name] for row in rows]) for name in ("first_token_ts", "last_token_ts"))
    outputs = np.array([row["output_toks"] for row in rows])
    ttft, e2e = (first - arrival - shift) * 1e3, (last - arrival - shift) * 1e3
    tpot = (last - first) * 1e3 / np.maximum(outputs - 1, 1)
    return Benchmark(
        file=folder.name,
        format="recorded run",
        sha256="",
        load=requests(
            [row["input_toks"] for row in rows],
            outputs,
            arrival_s=arrival - arrival.min(),
            tokens=tokens,
            request_ids=[row["request_id"] for row in rows],
        ),
        means={"ttft_ms": float(ttft.mean()), "tpot_ms": float(tpot.mean()), "e2e_ms": float(e2e.mean())},
        ttft_ms=ttft,
        tpot_ms=tpot,
        e2e_ms=e2e,
    )


def _in_engine(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Times from when the engine saw a request, as LLMServingSim counts them."""
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    queued, first, last = (np.array([row[name] for row in rows]) for name in names)
    gaps = np.maximum(np.array([row["output_toks"] for row in rows]) - 1, 1)
    return {"TTFT": (first - queued) * 1e3, "TPOT": (last - first) * 1e3 / gaps, "E2E": (last - queued) * 1e3}


def _deployment(name: str, gpu: str) -> Deployment:
    model = name.rpartition("/")[2]
    return Deployment(
        model=Architecture.find(model),
        gpu=find_gpu(gpu),
        weights="bf16",
        parallel=RANKS.get(model, Parallelism()),
    )


def _runs(folder: Path) -> Grid:
    grid = Grid(title="recorded runs, times from when the engine sees a request", title_justify="left")
    names = (
        "run",
        "times from",
        "measure",
        "measured",
        "predicted",
        "of means",
        "median of requests",
        "LLMServingSim",
    )
    for name in names:
        grid.add_column(name, justify="left" if name in names[:3] else "right")
    for name, (gpu, seqs, blocks, peer) in RUNS.items():
        deployment = _deployment(name, gpu)
        reached = preset(deployment.model, deployment.gpu, "bf16", "bf16").efficiencies
        engine = engine_for(
            deployment,
            max_num_seqs=seqs,
            max_num_batched_tokens=2048,
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
            vllm_version=VERSION,
        )
        preset_of = msgspec.structs.replace(
            engine, timing=Physical(coefficients=deployment.coefficients(reached))
        )
        card, _, model = name.partition("/")
        profile = folder.parent / "profiles" / card / OWNERS[model] / model / "tp1"
        tables = MeasuredKernels(
            folder=str(profile), deployment=deployment, efficiencies=reached, extrapolate=True
        )
        from_tables = msgspec.structs.replace(engine, timing=tables)
        for source, timed in (
            ("op tables", from_tables),
            ("preset", preset_of),
            ("preset, lengths alone", preset_of),
        ):
            load = _recorded(folder / name, prompts=source != "preset, lengths alone").load
            found = predict_run(
                load,
                timed,
                workers=deployment.parallel.data,
                ranks=deployment.steps_together,
            )
            rows = np.array([row[1:] for row in found]).T
            predicted = dict(zip(("TTFT", "TPOT", "E2E"), rows, strict=True))
            for (measure, measured), theirs in zip(_in_engine(folder / name).items(), peer, strict=True):
                ours = predicted[measure]
                grid.add_row(
                    name,
                    source,
                    measure,
                    f"{measured.mean():,.1f} ms",
                    f"{ours.mean():,.1f} ms",
                    f"{ours.mean() / measured.mean() - 1:+.1%}",
                    f"{np.median(np.abs(ours / measured - 1)):.1%}",
                    f"{theirs:+.1f}%",
                )
    return grid


def _halves(folder: Path) -> Grid:
    grid = Grid(
        title="fitted to the first 150 requests of a recorded run: the last 150", title_justify="left"
    )
    for name in ("run", "measure", "measured", "predicted", "of means"):
        grid.add_column(name, justify="left" if name in ("run", "measure") else "right")
    for name, (gpu, seqs, blocks, _) in RUNS.items():
        if name.rpartition("/")[2] in RANKS:
            continue
        deployment = _deployment(name, gpu)
        whole = _recorded(folder / name, prompts=True)
        # The second half of the requests is replayed too: it shares the engine with the first. It is not looked at.
        hidden = np.arange(len(whole.load.workload)) >= 150
        half = msgspec.structs.replace(
            whole,
            **{
                key: np.where(hidden, np.nan, getattr(whole, key)) for key in ("ttft_ms", "tpot_ms", "e2e_ms")
            },
        )
        flags = EngineFlags(
            max_num_seqs=seqs, max_num_batched_tokens=2048, num_gpu_blocks=blocks, vllm_version=VERSION
        )
        start = preset(deployment.model, deployment.gpu, "bf16", "bf16").efficiencies
        found = fit([half], deployment, start, flags, in_engine=True).outcomes[0]
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            measured, ours = getattr(whole, key)[hidden].mean(), getattr(found, key)[hidden].mean()
            grid.add_row(name, key, f"{measured:,.1f}", f"{ours:,.1f}", f"{ours / measured - 1:+.1%}")
    return grid


# --- calibrated from three summaries --------------------------------------------------------------------


def _calibrated(table: Table, only: str | None = None) -> Grid:
    deployments: dict[tuple[object, ...], list[Experiment]] = defaultdict(list)
    for index, row in enumerate(table.rows):
        one = table.experiment(index)
        what = one.deployment
        if only not in (None, STRATA[what.model.name]):
            continue
        who = (what.model.name, what.gpu.name, what.weights, what.parallel, row["backend_version"])
        deployments[who].append(one)
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for members in track(list(deployments.values()), "fitting"):
        chosen = _three(members)
        if chosen is None:
            continue
        group = STRATA[members[0].deployment.model.name]
        found = _fit_to(chosen)
        for one in members:
            if all(one is not seen for seen in chosen):
                ours = one.predict(found)
                for name, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms")):
                    errors[group, "all", name].append(ours[key] / one.measurement(key) - 1)
    return _table("calibrated from three rows of each deployment: the other rows", errors)


def _three(members: list[Experiment]) -> list[Experiment] | None:
    """Short prompts at low and high concurrency, long prompts in the middle; None where there is nothing to score."""
    prompts = {id(one): float(one.loads[0].workload.prompt_tokens.mean()) for one in members}
    short = sorted(
        (one for one in members if prompts[id(one)] < 2000), key=lambda one: one.loads[0].concurrency
    )
    long = sorted(
        (one for one in members if prompts[id(one)] >= 2000), key=lambda one: one.loads[0].concurrency
    )
    if len(short) < 2 or not long or len(members) < 5:
        return None
    return [short[0], short[-1], long[len(long) // 2]]


def _fit_to(chosen: list[Experiment]) -> Efficiencies:
    benchmarks = [
        Benchmark(
            file=one.name,
            format="row",
            sha256="",
            load=one.loads[0],
            means={name: one.measurement(name) for name in one.measured},
            engine={
                "max_num_seqs": one.engine.max_num_seqs or 1,
                "max_num_batched_tokens": one.engine.max_num_batched_tokens or 1,
            },
        )
        for one in chosen
    ]
    return fit(benchmarks, chosen[0].deployment, chosen[0].preset(), EngineFlags()).file.efficiencies


# --- fitted anew to a part of the rows ------------------------------------------------------------------

FAMILIES = {
    "Llama-3.1-70B fp8, Hopper": ("Llama-3.1-70B", ("H100", "H200"), "fp8", 4),
    "Llama-3.1-70B fp8, B200": ("Llama-3.1-70B", ("B200",), "fp8", 4),
    "Llama-3.1-70B nvfp4, B200": ("Llama-3.1-70B", ("B200",), "nvfp4", 4),
    "gpt-oss-120b, H100": ("gpt-oss-120b", ("H100",), "mxfp4", 4),
    "gpt-oss-120b, H200": ("gpt-oss-120b", ("H200",), "mxfp4", 2),
    "gpt-oss-120b, B200": ("gpt-oss-120b", ("B200",), "mxfp4", 2),
    "MiniMax-M2.5 fp8, B200": ("MiniMax-M2.5", ("B200",), "fp8", None),
    "MiniMax-M2.5 nvfp4, B200": ("MiniMax-M2.5", ("B200",), "nvfp4", 2),
    "MiniMax-M2.5 fp8, H100": ("MiniMax-M2.5", ("H100",), "fp8", None),
}
"""Model, GPUs, type of weights, and the size of tensor parallelism that is left out once."""
SCORED = (8, 32, 128)
"""Concurrencies that are left out."""
ROUND = Efficiencies(
    weights=0.7,
    compute=0.45,
    kv=0.7,
    experts=0.8,
    expert_compute=0.12,
    routing_ns=50.0,
    link=0.45,
    link_latency_us=12.0,
    step_ms=1.2,
    layer_us=6.0,
    sequence_us=10.0,
    prefill_ms=1.2,
    floor_ms_per_layer=0.5,
    front_end_ms=6.4,
)
"""Where every refit starts: no family's preset, so that nothing of the rows left out comes in by the prior."""
DENSE_NUMBERS = ("weights", "compute", "kv", "step_ms", "sequence_us", "prefill_ms", "front_end_ms")
EXPERT_NUMBERS = ("experts", "expert_compute", "routing_ns", "kv", "step_ms", "sequence_us", "front_end_ms")
SPREAD = 0.5


def _refitted(table: Table, only: str) -> Grid:
    grid = Grid(
        title="fitted anew to a part of the rows, from round numbers: the other rows", title_justify="left"
    )
    names = ("family", "left out", "rows fitted", "rows scored", "TPOT median, p90", "TTFT median, p90")
    for name in names:
        grid.add_column(name, justify="left" if name in names[:2] else "right")
    everything = [table.experiment(index) for index in range(len(table.rows))]
    splits = [
        (family, kind)
        for family, (*_, tensor) in FAMILIES.items()
        for kind in ("concurrencies", *(() if tensor is None else (f"TP {tensor}",)))
        if only in family
    ]
    for family, kind in track(splits, "fitting"):
        model, gpus, weights, tensor = FAMILIES[family]
        members = [
            one
            for one in everything
            if one.deployment.model.name == model
            and one.deployment.gpu.name in gpus
            and one.deployment.weights == weights
        ]
        out = [
            one.loads[0].concurrency in SCORED
            if kind == "concurrencies"
            else one.deployment.parallel.tensor == tensor
            for one in members
        ]
        seen = [one for one, left_out in zip(members, out, strict=True) if not left_out]
        others = [one for one, left_out in zip(members, out, strict=True) if left_out]
        found = _fit_family(seen)
        with ThreadPoolExecutor() as pool:
            ours = list(pool.map(lambda one, found=found: one.predict(found), others))
        cells = []
        for key in ("tpot_ms", "ttft_ms"):
            off = [abs(a[key] / b.measurement(key) - 1) for a, b in zip(ours, others, strict=True)]
            cells.append(f"{np.median(off):.1%}, {np.quantile(off, 0.9):.1%}")
        grid.add_row(family, kind, str(len(seen)), str(len(others)), *cells)
    return grid


def _fit_family(members: list[Experiment]) -> Efficiencies:
    """The numbers of a preset, fitted to these rows: TPOT with weight 1.5, TTFT with 0.5."""
    names = list(EXPERT_NUMBERS if members[0].deployment.model.num_experts else DENSE_NUMBERS)
    start = ROUND
    if members[0].deployment.gpu.name == "B200":
        names.append("floor_ms_per_layer")
    else:
        start = msgspec.structs.replace(start, floor_ms_per_layer=0.0)
    if any(one.deployment.parallel.tensor > 1 for one in members):
        names += ["link", "link_latency_us"]
    singles = [msgspec.structs.replace(one, loads=one.loads[:1]) for one in members]

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = msgspec.structs.replace(start, **dict(zip(names, map(float, values), strict=True)))
        with ThreadPoolExecutor() as pool:
            ours = list(pool.map(lambda one: one.predict(reached), singles))
        return np.array(
            [
                weight * np.log(found[key] / one.measurement(key))
                for found, one in zip(ours, members, strict=True)
                for key, weight in (("tpot_ms", 1.5), ("ttft_ms", 0.5))
            ]
        )

    solution = solve(
        residuals,
        np.array([getattr(start, name) for name in names]),
        prior=np.full(len(names), SPREAD),
        noise=0.04,
        iterations=6,
    )
    return msgspec.structs.replace(start, **dict(zip(names, map(float, solution.values), strict=True)))


if __name__ == "__main__":
    main()
