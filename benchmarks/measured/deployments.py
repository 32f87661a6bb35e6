"""Predict whole deployments without what was fitted to them: a deployment is a model, a GPU, an engine and a type."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid

from measured.errors import spread
from measured.more import read_more, relabelled
from understudy.calibrate.predict import Prediction, predict_table
from understudy.calibrate.tables import Table
from understudy.errors import UnderstudyError
from understudy.timing import expert_presets, fitted_factors
from understudy.timing.engine_names import ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from understudy.calibrate.experiment import Experiment
    from understudy.timing.fitted_factors import FittedFile


class Deployed(NamedTuple):
    """What a row was measured on."""

    model: str
    gpu: str
    engine: str
    weights: str

    @classmethod
    def of(cls, one: Experiment) -> Deployed:
        """Return the deployment of a row."""
        what = one.deployment
        return cls(what.model.name, what.gpu.name, one.backend, what.weights)


class Scores:
    """Errors of one deployment: predicted / measured - 1."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.first: list[float] = []
        """Of rows whose load is known; without it, a time to the first token says nothing."""
        self.refused = 0


def read_tables(paths: Sequence[Path], corrections: Path | None) -> list[Table]:
    """Read tables of closed loops, with corrected cells."""
    found = [read_more(path) for path in paths]
    return found if corrections is None else [relabelled(table, corrections) for table in found]


def leave_out(
    tables: Sequence[Table],
    *,
    only: str = "",
    draws: int | None = None,
    refit: Callable[[Deployed], FittedFile] | None = None,
) -> dict[Deployed, Scores]:
    """Predict the rows of every deployment with the presets that are left without its own.

    `refit` returns the fitted factors without a deployment; None: all presets as they are, with their own numbers.
    """
    groups: dict[Deployed, list[tuple[Table, int]]] = defaultdict(list)
    scores: dict[Deployed, Scores] = defaultdict(Scores)
    for table in tables:
        for place, row in enumerate(table.rows):
            if row.get("speculation"):
                continue  # the source does not say what the engine did
            try:
                groups[Deployed.of(table.experiment(place))].append((table, place))
            except UnderstudyError as error:
                scores[Deployed(row["model_path"], row["system"], row.get("backend", ""), "")].refused += 1
                print(error, file=sys.stderr)
    chosen = {name: rows for name, rows in groups.items() if only.lower() in " ".join(name).lower()}
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("deployments", total=sum(map(len, chosen.values())))
        for name, rows in sorted(chosen.items()):
            if refit is None:
                _score(scores[name], rows, draws)
            else:
                with without(name, refit(name)):
                    _score(scores[name], rows, draws)
            bar.advance(task, len(rows))
    return scores


def list_rows(tables: Sequence[Table]) -> Iterator[tuple[Experiment, dict[str, str]]]:
    """Yield the rows that can be scored, and their cells."""
    for table in tables:
        for place, row in enumerate(table.rows):
            if not row.get("speculation"):
                try:
                    yield table.experiment(place), row
                except UnderstudyError as error:
                    print(error, file=sys.stderr)


@contextmanager
def without(name: Deployed, factors: FittedFile) -> Iterator[None]:
    """Remove the numbers that were fitted to a deployment alone, and use these factors."""
    own = (name.model, name.weights, name.gpu)
    left = {
        key: value for key, value in expert_presets.EXPERTS.items() if key != own or name.engine != "vllm"
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "factors.json"
        file.write_bytes(msgspec.json.encode(factors))
        with (
            patch.dict(expert_presets.EXPERTS, left, clear=True),
            patch.object(fitted_factors, "FILE", file),
        ):
            yield


def _score(scores: Scores, rows: list[tuple[Table, int]], draws: int | None) -> None:
    for table in dict.fromkeys(table for table, _ in rows):
        cells = [table.rows[place] for other, place in rows if other is table]
        for row, found in zip(cells, _predict(Table(table.path, table.layout, cells), draws), strict=True):
            if not isinstance(found, Prediction):
                scores.refused += 1
                print(found, file=sys.stderr)
                continue
            scores.tokens.append(found.means["tpot_ms"] / float(row["tpot_ms"]) - 1)
            if row.get("ttft_usable", "1") == "1":
                scores.first.append(found.means["ttft_ms"] / float(row["ttft_ms"]) - 1)


def _predict(table: Table, draws: int | None) -> list[Prediction | UnderstudyError]:
    if draws is None:
        return predict_table(table)
    with patch("understudy.calibrate.closed_loop_rows.count_draws", lambda *_: draws):
        return predict_table(table)


def format_scores(scores: dict[Deployed, Scores]) -> Grid:
    """Return the errors of every deployment, and their medians over deployments."""
    grid = Grid(title="whole deployments", title_justify="left")
    heads = ("deployment", "rows", "refused", "TPOT", "p90", "bias", "TTFT", "p90", "bias")
    for head in heads:
        grid.add_column(head, justify="left" if head == heads[0] else "right")
    for name, found in sorted(scores.items()):
        title = f"{name.model} {name.weights} on {name.gpu}, {ENGINES.get(name.engine, name.engine)}"
        cells = [_cells(errors) for errors in (found.tokens, found.first)]
        grid.add_row(title, str(len(found.tokens)), str(found.refused or ""), *cells[0], *cells[1])
    grid.add_section()
    for title, middle in (("median over deployments", np.median), ("mean over deployments", np.mean)):
        tokens = [np.median(np.abs(one.tokens)) for one in scores.values() if one.tokens]
        first = [np.median(np.abs(one.first)) for one in scores.values() if one.first]
        of_first = f"{middle(first):.1%}" if first else "–"
        grid.add_row(title, str(len(tokens)), "", f"{middle(tokens):.1%}", "", "", of_first, "", "")
    return grid


def _cells(errors: list[float]) -> tuple[str, str, str]:
    return (*spread(errors), f"{np.median(errors):+.1%}") if errors else ("–", "–", "–")
