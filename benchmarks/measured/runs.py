"""Recorded runs: predicted request by request, and fitted by halves."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.table import Table as Grid

from understudy.calibrate.benchmark import Benchmark
from understudy.calibrate.engine_flags import EngineFlags
from understudy.calibrate.experiment import build_engine_config
from understudy.calibrate.fit import fit
from understudy.calibrate.load import build_load
from understudy.calibrate.recorded import predict_run
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.physical import Physical
from understudy.timing.presets import preset
from understudy.timing.sources import MeasuredKernels

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

RUNS = {
    "RTX4090/Llama-3.1-8B": ("RTX 4090", 256, 2587, (0.6, 0.2, 0.5)),
    "RTXPRO6000/Llama-3.1-8B": ("RTX PRO 6000", 128, None, (-4.0, -1.0, -1.8)),
    "RTXPRO6000/Qwen3-30B-A3B-Instruct-2507": ("RTX PRO 6000", 128, None, (-13.6, -1.7, -2.2)),
}
"""GPU, max_num_seqs, usable blocks where recorded, and what LLMServingSim shows: TTFT, TPOT, E2E in percent."""
PROMPTS = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b"}
VERSION = "0.19.0"
RANKS = {"Qwen3-30B-A3B-Instruct-2507": Parallelism(data=2, expert=2)}
OWNERS = {"Llama-3.1-8B": "meta-llama", "Qwen3-30B-A3B-Instruct-2507": "Qwen"}


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
        load=build_load(
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
        model=find_architecture(model),
        gpu=find_gpu(gpu),
        weights="bf16",
        parallel=RANKS.get(model, Parallelism()),
    )


def recorded_runs(folder: Path) -> Grid:
    """Op tables and presets, with the tokens of the prompts and without, scored request by request."""
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
        engine = build_engine_config(
            deployment,
            max_num_seqs=seqs,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            vllm_version=VERSION,
            **dict[str, Any]({} if blocks is None else {"num_gpu_blocks": blocks}),
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
            rows = np.array([row[1:] for row in found.requests]).T
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


def halves(folder: Path) -> Grid:
    """Numbers fitted to the first half of a run, and the means of the second."""
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
        fitted = fit([half], deployment, start, flags, in_engine=True)
        found = fitted.outcomes[0]
        numbers = ", ".join(f"{one.name} {one.preset:.3g} → {one.value:.3g}" for one in fitted.file.fitted)
        grid.caption = f"{grid.caption or ''}{name}: {numbers}\n"
        for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
            measured, ours = getattr(whole, key)[hidden].mean(), getattr(found, key)[hidden].mean()
            grid.add_row(name, key, f"{measured:,.1f}", f"{ours:,.1f}", f"{ours / measured - 1:+.1%}")
    return grid
