"""Write docs/accuracy.md as a whole: text of tools/accuracy_page.md, tables from stored errors and results.

python tools/write_accuracy.py LEFT_OUT.json OWN.json    stores the errors of benchmarks/leave_one_out.py first,
                                                         without and with --keep
python tools/write_accuracy.py [--check]                 only the page, from what is stored
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from accuracy_tables import render_tables
from understudy.timing.accuracy import FILE, Error, Errors, MeasuredErrors, read_errors
from understudy.timing.known_models import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
TEXT = Path(__file__).with_name("accuracy_page.md")
NOTE = "<!-- written by tools/write_accuracy.py from tools/accuracy_page.md; do not edit -->\n\n"
_TABLE = re.compile(r"<!-- table: ([^>]+) -->")


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
    written = write_page()
    if args.check:
        is_stale = written != PAGE.read_text()
        if is_stale:
            print(f"{PAGE} is stale; run python tools/write_accuracy.py", file=sys.stderr)
        return int(is_stale)
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


def write_page() -> str:
    """Return the page: its text, with the tables in the places that it names."""
    tables = render_tables()
    missing = list(tables)

    def fill(found: re.Match[str]) -> str:
        missing.remove(found[1])
        return tables[found[1]]

    text = _TABLE.sub(fill, TEXT.read_text())
    if missing:
        raise ValueError(
            f"{TEXT.name}: no place for the table {missing[0]}; add <!-- table: {missing[0]} -->"
        )
    return f"{NOTE}{text}"


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
