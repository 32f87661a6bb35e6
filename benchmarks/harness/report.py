"""Rows of numbers, as a table for people and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measurement beside its peer's. `ratio` is how many times faster we are."""

    group: str
    operation: str
    unit: str
    median: float
    best: float | None = None
    peer: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def table(title: str, peer: str, rows: Sequence[Row]) -> Table:
    """A table with a line between the groups."""
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for left in ("", "operation", "unit"):
        out.add_column(left, no_wrap=True)
    for right in ("median", "best", peer, "ratio", "target", ""):
        out.add_column(right, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1].group != row.group
        last = i + 1 == len(rows) or rows[i + 1].group != row.group
        out.add_row(
            row.group if first else "",
            row.operation,
            row.unit,
            number(row.median),
            number(row.best),
            number(row.peer),
            "" if row.ratio is None else f"{number(row.ratio)}×",
            row.target,
            "" if row.met is None else "✓" if row.met else "✗",
            end_section=last,
        )
    return out


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"


def machine() -> dict[str, object]:
    """What the numbers depend on, the load of other processes included."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load average": round(os.getloadavg()[0], 1),
    }


def processor() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_json(path: Path, facts: dict[str, object], rows: Sequence[Row]) -> None:
    """Everything that was printed."""
    path.write_text(
        json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8"
    )
