"""Read tables of experiments, one per row.

Closed loops of random lengths (InferenceX), constant rates (BLIS), or offline throughput (TensorRT-LLM).
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Literal

from understudy.calibrate import closed_loop_rows, offline_rows, stage_rows
from understudy.calibrate.experiment import THROUGHPUT
from understudy.calibrate.table_row import TableRow
from understudy.errors import ConfigError, InvalidArgument, UnderstudyError

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.calibrate.experiment import Experiment

Layout = Literal["closed_loop", "stages", "offline"]

_NEEDS: dict[Layout, tuple[str, ...]] = {
    "closed_loop": (
        "key",
        "system",
        "model_path",
        "isl",
        "osl",
    ),
    "stages": (
        "exp_id",
        "model",
        "hardware",
        "prompt_tokens",
        "max_tokens",
        "stage_rates_per_s",
        "stage_seconds",
        "distinct_prompts",
    ),
    "offline": offline_rows.NEEDS,
}
_COLUMNS: dict[Layout, tuple[str, ...]] = {
    "closed_loop": closed_loop_rows.COLUMNS,
    "stages": stage_rows.COLUMNS,
    "offline": offline_rows.COLUMNS,
}
_READERS = {
    "closed_loop": closed_loop_rows.read_closed_loop,
    "stages": stage_rows.read_stages,
    "offline": offline_rows.read_offline,
}


class Table:
    """The rows of a CSV file and their layout."""

    def __init__(self, path: Path, layout: Layout, rows: list[dict[str, str]]) -> None:
        self.path = path
        self.layout = layout
        self.rows = rows

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a table. ConfigError names the file and the missing column."""
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file)
                columns = [name.strip() for name in reader.fieldnames or ()]
                reader.fieldnames = columns
                rows = [row for row in reader if any(isinstance(cell, str) and cell for cell in row.values())]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: {error}") from error
        layout = _find_layout(columns)
        missing = [name for name in _NEEDS[layout] if name not in columns]
        if missing:
            raise ConfigError(
                f"{path}: column {missing[0]} is missing; a table has key, system, model_path, … (closed loops), "
                "exp_id, model, hardware, … (constant rates) or model, gpu, parallel, output_tok_s_per_gpu, … (offline "
                "throughput)"
            )
        if not rows:
            raise ConfigError(f"{path} has no row below its header")
        if layout == "offline":
            rows = [{**row, "key": offline_rows.name_row(row)} for row in rows]
        return cls(path, layout, rows)

    @property
    def columns_out(self) -> tuple[str, ...]:
        """Header of the predictions: times, and rates of requests or tokens that the table has too."""
        if self.layout == "stages":
            return ("exp_id", "ttft_ms", "itl_ms", "e2e_ms")
        rates = [name for name in THROUGHPUT if any(row.get(name) for row in self.rows)]
        return ("key", "ttft_ms", "tpot_ms", *rates)

    @property
    def ignored_columns(self) -> list[str]:
        """Names of columns with cells that no prediction depends on, in the order of the file."""
        known = (*_COLUMNS[self.layout], "")
        filled = {name: None for row in self.rows for name, cell in row.items() if name and cell}
        return [name for name in filled if name not in known]

    def experiment(self, index: int) -> Experiment:
        """Build the experiment of one row. InvalidArgument names file, line, column and problem."""
        row = TableRow(f"{self.path}:{index + 2}", self.rows[index])
        try:
            return _READERS[self.layout](row)
        except UnderstudyError as error:
            text = str(error)
            raise InvalidArgument(text if text.startswith(row.where) else f"{row.where}: {text}") from error


def _find_layout(columns: list[str]) -> Layout:
    if "exp_id" in columns:
        return "stages"
    return "offline" if {"gpu", "parallel"} <= set(columns) and "system" not in columns else "closed_loop"
