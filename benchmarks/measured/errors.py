"""Errors of predictions by group, as a table beside what must be reached and what peers reach."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from rich.table import Table as Grid

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


class Errors:
    """predicted / measured - 1, by group, place and measure."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, group: str, where: str, measure: str, predicted: float, measured: float) -> None:
        self._values[group, where, measure].append(predicted / measured - 1)

    def table(self, title: str) -> Grid:
        """Median and p90 of their sizes, and the median with its sign."""
        grid = Grid(title=title, title_justify="left")
        names = (
            "data",
            "where",
            "rows",
            "measure",
            "median",
            "p90",
            "bias",
            "must reach unseen",
            "best peer",
        )
        for name in names:
            grid.add_column(name, justify="right" if name in ("rows", "median", "p90", "bias") else "left")
        for (group, where, measure), values in sorted(self._values.items()):
            must, peer = BARS.get((group, measure), ("", "")) if where == "all" else ("", "")
            bias = f"{np.median(values):+.1%}"
            grid.add_row(group, where, str(len(values)), measure, *spread(values), bias, must, peer)
        return grid


def spread(values: list[float]) -> tuple[str, str]:
    """Median and p90 of the sizes of errors, in words."""
    sizes = np.abs(values)
    return f"{np.median(sizes):.1%}", f"{np.quantile(sizes, 0.9):.1%}"
