"""Predictions on rows of other engines, GPUs and models, by deployment; most of them were not fitted to."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from measured.errors import Errors
from understudy.calibrate.predict import Prediction, predict_table
from understudy.calibrate.tables import Table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table as Grid

_GRAPHS = "max_cudagraph_capture_size"
_LARGE_GRAPHS = ("gpt-oss", "MiniMax"), "2026-04", "2048"
"""Models whose benchmark captured larger graphs, since which month, and up to which size."""


def read_more(path: Path) -> Table:
    """Read the rows, with the graphs that the scripts of their benchmark captured."""
    found = Table.read(path)
    names, month, size = _LARGE_GRAPHS
    for row in found.rows:
        is_vllm = row.get("backend", "vllm") == "vllm"
        if is_vllm and row.get("measured", "") >= month and any(name in row["model_path"] for name in names):
            row.setdefault(_GRAPHS, size)
    return found


def relabelled(table: Table, corrections: Path) -> Table:
    """Return the table with the corrected cells of a file of key, column, was, is; the table if there is no file."""
    if not corrections.exists():
        return table
    rows = {row["key"]: dict(row) for row in table.rows}
    with corrections.open(newline="") as file:
        for cell in csv.DictReader(file):
            if cell["key"] in rows:
                rows[cell["key"]][cell["column"]] = cell["is"]
    return Table(table.path, table.layout, [rows[row["key"]] for row in table.rows])


def on_more(table: Table) -> tuple[Grid, Counter[str]]:
    """Score every row by its stratum; return the errors, and how many rows are refused for which reason."""
    errors, refused = Errors(), Counter[str]()
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(table.path.name, total=len(table.rows))
        results = predict_table(table, progress=lambda done: bar.update(task, completed=done))
    for row, found in zip(table.rows, results, strict=True):
        if not isinstance(found, Prediction):
            refused[str(found).partition(": ")[2][:90]] += 1
            continue
        errors.add(row["stratum"], "", "TPOT", found.means["tpot_ms"], float(row["tpot_ms"]))
        if row.get("ttft_usable", "1") == "1":
            errors.add(row["stratum"], "", "TTFT", found.means["ttft_ms"], float(row["ttft_ms"]))
    return errors.table("rows of other engines, GPUs and models"), refused
