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
    """Return the table."""
    lines = [
        "| deployment | rows | left out: TPOT median, p90 | TTFT | own numbers: TPOT median, p90 | TTFT |",
        "|---|---|---|---|---|---|",
    ]
    for one in errors:
        cells = [
            "–" if errors_of is None or (error := getattr(errors_of, name)) is None else error.text()
            for errors_of in (one.left_out, one.own)
            for name in ("tpot", "ttft")
        ]
        name = f"{one.model} {one.weights}, {one.gpu}, {ENGINES[one.engine]}"
        lines.append(f"| {name} | {one.rows} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
