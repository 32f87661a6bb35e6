"""Write the errors of measured deployments, and their table in docs/accuracy.md.

python tools/write_accuracy.py LEFT_OUT.json OWN.json    from benchmarks/leave_one_out.py, without and with --keep
python tools/write_accuracy.py [--check]                 only the table, from the errors that are stored
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from understudy.timing.accuracy import FILE, Error, Errors, MeasuredErrors, read_errors
from understudy.timing.engine_names import ENGINES
from understudy.timing.known_models import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- written by tools/write_accuracy.py -->\n", "<!-- end -->\n"

ASKED = (
    *("DeepSeek-R1", "Kimi-K2.5", "GLM-5", "Qwen3.5-397B-A17B", "MiniMax-M2.5", "gpt-oss-120b"),
    *("Qwen3-235B-A22B", "Qwen3-32B", "Llama-3.1-70B", "Llama-3.1-8B"),
)
"""Models in the order in which people ask for them; others follow by name."""
GPUS_ASKED = ("B300", "B200", "H200", "H100")
ENGINES_ASKED = ("vllm", "sglang", "trtllm")


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="JSON")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.files:
        left_out, own = (json.loads(path.read_text()) for path in args.files)
        FILE.write_text(encode(merge(left_out, own)))
        read_errors.cache_clear()
    page = PAGE.read_text()
    written = replace_table(page, render(read_errors()))
    if args.check:
        if written != page:
            print(f"{PAGE} is stale; run python tools/write_accuracy.py", file=sys.stderr)
        return int(written != page)
    PAGE.write_text(written)
    return 0


def merge(left_out: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[MeasuredErrors]:
    """Return the errors of each deployment from both results."""

    def name_of(one: dict[str, Any]) -> tuple[str, ...]:
        return tuple(one[key] for key in ("model", "gpu", "engine", "weights"))

    others = {name_of(one): one for one in own}
    return [
        MeasuredErrors(
            model=one["model"],
            gpu=one["gpu"],
            engine=one["engine"],
            weights=one["weights"],
            rows=len(one["tpot"]),
            own=_errors(others[name_of(one)]),
            left_out=None if is_start(one) else _errors(one),
        )
        for one in sorted(left_out, key=name_of)
        if one["tpot"]
    ]


def is_start(one: dict[str, Any]) -> bool:
    """Whether a deployment is of vLLM's dense models, whose presets are not fitted again without it."""
    return one["engine"] == "vllm" and not MODELS[one["model"]].num_experts


def encode(errors: list[MeasuredErrors]) -> str:
    """Return the file, a deployment per line."""
    return "[\n" + ",\n".join(" " + msgspec.json.encode(one).decode() for one in errors) + "\n]\n"


def render(errors: tuple[MeasuredErrors, ...]) -> str:
    """Return the medians and the table."""
    lines = [
        summarise(errors),
        "| deployment | rows | left out: TPOT median, p90 | TTFT | own numbers: TPOT median, p90 | TTFT |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(errors, key=place_of):
        cells = [
            "–" if errors_of is None or (error := getattr(errors_of, name)) is None else error.text()
            for errors_of in (one.left_out, one.own)
            for name in ("tpot", "ttft")
        ]
        name = f"{one.model} {one.weights}, {one.gpu}, {ENGINES[one.engine]}"
        lines.append(f"| {name} | {one.rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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


def replace_table(page: str, table: str) -> str:
    """Return the page with this table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def _errors(one: dict[str, Any]) -> Errors:
    tpot, ttft = (_error(one[name]) for name in ("tpot", "ttft"))
    assert tpot is not None
    return Errors(tpot=tpot, ttft=ttft)


def _error(values: list[float]) -> Error | None:
    if not values:
        return None
    sizes = np.abs(values) * 100
    return Error(round(float(np.median(sizes)), 1), round(float(np.quantile(sizes, 0.9)), 1))


if __name__ == "__main__":
    sys.exit(main())
