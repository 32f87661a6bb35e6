"""Tables of docs/accuracy.md, from stored errors, stored results and the table of GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from understudy.timing.accuracy import read_errors
from understudy.timing.engine_names import ENGINES
from understudy.timing.gpus import GPUS

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from harness.cells import format_number  # noqa: E402
from harness.result import FOLDER, read_result  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.timing.accuracy import Errors, MeasuredErrors
    from understudy.timing.gpus import Gpu

STORED = ROOT / "benchmarks" / "measured" / "accuracy_tables.json"
"""Tables whose numbers benchmarks/accuracy.py prints: columns, and rows of cells."""
ASKED = (
    *("DeepSeek-R1", "Kimi-K2.5", "GLM-5", "Qwen3.5-397B-A17B", "MiniMax-M2.5", "gpt-oss-120b"),
    *("Qwen3-235B-A22B", "Qwen3-32B", "Llama-3.1-70B", "Llama-3.1-8B"),
)
"""Models in the order in which people ask for them; others follow by name."""
GPUS_ASKED = ("B300", "B200", "H200", "H100")
ENGINES_ASKED = ("vllm", "sglang", "trtllm")


def render_tables() -> dict[str, str]:
    """Return the text of every table by its name on the page."""
    stored = json.loads(STORED.read_text())
    return {
        **{name: format_table(one["columns"], one["rows"]) for name, one in stored.items()},
        "deployments": render_deployments(read_errors()),
        "gpus": render_gpus(),
        "goals": render_goals(),
    }


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = [f"| {' | '.join(line)} |" for line in lines]
    text[1] = f"|{'---|' * len(columns)}"
    return "\n".join(text).replace("|  |", "| |")


def render_deployments(errors: tuple[MeasuredErrors, ...]) -> str:
    """Return the medians over deployments, and the table of all, in the order in which people ask for them."""
    rows = []
    for one in sorted(errors, key=place_of):
        cells = [
            "–" if errors_of is None or (error := getattr(errors_of, name)) is None else error.text()
            for errors_of in (one.left_out, one.own)
            for name in ("tpot", "ttft")
        ]
        rows.append([f"{one.model} {one.weights}, {one.gpu}, {ENGINES[one.engine]}", str(one.rows), *cells])
    heads = (
        "deployment",
        "rows",
        "left out: TPOT median, p90",
        "TTFT",
        "own numbers: TPOT median, p90",
        "TTFT",
    )
    return f"{summarise(errors)}\n{format_table(heads, rows)}"


def place_of(one: MeasuredErrors) -> tuple[object, ...]:
    """Return the place of a deployment in the table: by model, GPU and engine as people ask for them."""

    def rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
        return (order.index(name) if name in order else len(order), name)

    return (rank(one.model, ASKED), rank(one.gpu, GPUS_ASKED), rank(one.engine, ENGINES_ASKED), one.weights)


def summarise(errors: tuple[MeasuredErrors, ...]) -> str:
    """Return the sentences on all deployments: how many were left out and fitted, and the medians over them."""

    def describe(found: list[Errors]) -> str:
        tpot, ttft = (
            np.median([one.median for each in found if (one := getattr(each, name)) is not None])
            for name in ("tpot", "ttft")
        )
        return f"TPOT {tpot:.1f} %, TTFT {ttft:.1f} %"

    left = [one for one in errors if one.left_out is not None]
    return (
        f"Medians over the {len(left)} deployments that can be left out ({sum(one.rows for one in left):,} rows): "
        f"{describe([one.left_out for one in left if one.left_out is not None])}.\n"
        f"With their own numbers, over all {len(errors)} ({sum(one.rows for one in errors):,} rows): "
        f"{describe([one.own for one in errors])}.\n"
    )


def render_gpus() -> str:
    """Return the GPUs that were never measured, with the numbers of their data sheets."""

    def peaks(gpu: Gpu) -> str:
        return ", ".join(
            "–" if one is None else f"{one:,g}" for one in (gpu.bf16_tflops, gpu.fp8_tflops, gpu.fp4_tflops)
        )

    rows = [
        [
            gpu.name,
            f"{gpu.memory_gb} GB, {gpu.bandwidth_gbps / 1e3:.4g} TB/s",
            f"{gpu.link_gbps:g} GB/s",
            peaks(gpu),
            gpu.like,
        ]
        for gpu in GPUS.values()
        if gpu.like
    ]
    heads = ("GPU", "memory", "link, one direction", "bf16, fp8, fp4 TFLOP/s", "efficiencies of")
    return format_table(heads, rows)


def render_goals() -> str:
    """Return the goals of step times, what was measured, and whether each is met."""
    result = read_result(FOLDER / "timing_goals.json")
    rows = []
    for row in result.rows:
        for column, number in row.numbers.items():
            goal = row.goals.get(column)
            what = row.name if column == "other" else f"{row.name}: {column}"
            said = "–" if goal is None else f"{goal.limit:g} %"
            met = "" if goal is None else "met" if goal.is_met(number) else "missed"
            rows.append([what, f"{format_number(number, 1)} %", said, met])
    return format_table(("error", "median", "goal", ""), rows)
