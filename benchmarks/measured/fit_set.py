"""Presets on the rows that they were fitted on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from measured.errors import Errors
from understudy.calibrate.predict import Prediction, predict_table

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from understudy.calibrate.tables import Table

STRATA = {"Llama-3.1-70B": "dense 70B", "gpt-oss-120b": "gpt-oss", "MiniMax-M2.5": "MiniMax"}


def on_the_fit_set(closed: Table, stages: Table) -> Grid:
    """Both tables through `understudy predict`, scored."""
    errors = Errors()
    for index, found in enumerate(_predicted(closed)):
        one = closed.experiment(index)
        group = STRATA[one.deployment.model.name]
        for where in (f"{one.deployment.gpu.name} {one.deployment.weights}", "all"):
            for name, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms")):
                errors.add(group, where, name, found[key], one.measurement(key))
    for index, found in enumerate(_predicted(stages)):
        one = stages.experiment(index)
        group = "BLIS experts" if one.deployment.model.num_experts else "BLIS dense"
        for where in (one.deployment.gpu.name, "all"):
            for name, key in (("ITL", "itl_ms"), ("E2E", "e2e_ms"), ("TTFT", "ttft_ms")):
                errors.add(group, where, name, found[key], one.measurement(key))
    return errors.table("presets on the fit set: median and p90 of |predicted / measured - 1|")


def _predicted(table: Table) -> list[dict[str, float]]:
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(table.path.name, total=len(table.rows))
        results = predict_table(table, progress=lambda done: bar.update(task, completed=done))
    found = []
    for result in results:
        if not isinstance(result, Prediction):
            raise result
        found.append(result.means)
    return found
