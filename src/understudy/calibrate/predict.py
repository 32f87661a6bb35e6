"""Predict the times of a table of experiments: replay each row's load with the preset of its deployment."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import InvalidArgument, UnderstudyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.calibrate.tables import Table


class Prediction(msgspec.Struct, frozen=True):
    """Mean times of a row by name, in milliseconds, and the source of the step times."""

    means: dict[str, float]
    origin: str


def predict_table(
    table: Table, *, threads: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Prediction | UnderstudyError]:
    """Predict every row, in order; a row that cannot be predicted yields its error instead.

    `progress` is called with the number of rows done.
    """

    def predict(index: int) -> Prediction | UnderstudyError:
        try:
            one = table.experiment(index)
            start = one.preset()
            return Prediction(one.predict(start.efficiencies), f"preset, {start.trust}: {start.origin}")
        except UnderstudyError as error:
            where = f"{table.path}:{index + 2}"
            return error if str(error).startswith(where) else InvalidArgument(f"{where}: {error}")

    results = []
    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        for result in pool.map(predict, range(len(table.rows))):
            results.append(result)
            if progress is not None:
                progress(len(results))
    return results
