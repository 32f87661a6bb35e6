"""Predict the times of benchmarks: a table of experiments, or a recorded run."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.calibrate.recorded import COLUMNS, predict_run, read_run
from understudy.calibrate.tables import Table
from understudy.checks import check_model
from understudy.defaults import is_default
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument, UnderstudyError
from understudy.run.settings import apply_gpus
from understudy.text import plural
from understudy.tiers.gpu import GpuSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from pandas import DataFrame

    from understudy.engines.engine_config import EngineConfig


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
            origin = "; ".join((f"preset, {start.trust}: {start.origin}", start.range_text, *one.notes))
            return Prediction(one.predict(start.efficiencies), origin)
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


class Predictions(msgspec.Struct, frozen=True):
    """Predicted times: a name and times (ms) per row, the sources of step times, and rows without a prediction."""

    columns: tuple[str, ...]
    """Names of the values in a row: the row's name, then times in milliseconds."""
    rows: list[tuple[str, *tuple[float, ...]]]
    """Values of each row, in the order of `columns`; NaN for TPOT and ITL of one-token answers."""
    sources: dict[str, int]
    """Number of rows by the source of their step times."""
    errors: list[UnderstudyError]
    """Errors of rows without a prediction."""

    @classmethod
    def of(cls, table: Table, results: list[Prediction | UnderstudyError]) -> Predictions:
        """Collect the results of all rows of a table."""
        name, *measures = table.columns_out
        found = [
            (row[name], result)
            for row, result in zip(table.rows, results, strict=True)
            if isinstance(result, Prediction)
        ]
        return cls(
            table.columns_out,
            [(key, *(result.means[measure] for measure in measures)) for key, result in found],
            dict(Counter(result.origin for _, result in found).most_common()),
            [result for result in results if not isinstance(result, Prediction)],
        )

    def __repr__(self) -> str:
        left = f", {plural(len(self.errors), 'row')} left out" if self.errors else ""
        return f"<Predictions of {plural(len(self.rows), 'row')}: {', '.join(self.columns[1:])}{left}; rows has them>"

    def to_pandas(self) -> DataFrame:
        """Return the rows as a pandas DataFrame. ConfigError without pandas."""
        from understudy.report.requests import import_pandas

        return import_pandas().DataFrame(self.rows, columns=list(self.columns))


def predict(
    inputs: str | PathLike[str],
    *,
    model: str | None = None,
    gpu: str | GpuSettings | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
) -> Predictions:
    """Predict the times of a table of experiments (.csv) or of a recorded run (JSON lines).

    Rows of a table name their own model and GPU. A recorded run needs `model` and `gpu`, and its times count from a
    request's arrival at the engine.

    Parameters:
        inputs: path of a table (.csv) or of a recorded run.
        model: name of a known model, such as Llama-3.1-8B, or path of a Hugging Face config.json.
        gpu: name of a GPU, such as H100, or GpuSettings.
        kv_dtype: data type of the KV cache, such as fp8 (default: the model's own).
        threads: rows of a table to replay in parallel (default: one per CPU).

    Errors: ConfigError for a missing or superfluous argument; InvalidArgument for a file that cannot be read.

    Example:
        found = us.predict("recorded.jsonl", model="Llama-3.1-8B", gpu="H100")
        print(found.columns, found.rows[0])
    """
    if not isinstance(inputs, str | os.PathLike):
        raise ConfigError(f"inputs must be the path of a table or of a recorded run, got {inputs!r}")
    check_model(model)
    path = Path(inputs)
    if path.suffix.lower() == ".csv":
        given = {"model": model, "gpu": gpu, "kv_dtype": kv_dtype}
        if names := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{names[0]}: rows of {path.name} name their own; leave it out")
        table = Table.read(path)
        return Predictions.of(table, predict_table(table, threads=threads))
    if threads is not None:
        raise ConfigError("threads is for a table of experiments; leave it out for a recorded run")
    if model is None or gpu is None:
        raise ConfigError(f"model, gpu: the recorded run {path.name} needs both; give them")
    gpus = GpuSettings(name=gpu) if isinstance(gpu, str) else gpu
    gpus = msgspec.structs.replace(gpus, front_end_ms=0.0)
    deployment = gpus.deployment(model, kv_dtype)
    engine = build_engine_on_gpu(gpus, model, kv_dtype)
    run = predict_run(
        read_run(path),
        msgspec.structs.replace(engine, timing=gpus.timing(model, kv_dtype)),
        workers=deployment.parallel.data,
        ranks=deployment.steps_together,
    )
    return Predictions(COLUMNS, list(run.requests), {run.origin: len(run.requests)}, [])


def build_engine_on_gpu(gpus: GpuSettings, model: str, kv_dtype: str | None, **given: Any) -> EngineConfig:
    """Configure vLLM with `model` on these GPUs: the settings that were given, by name, and what vLLM chooses.

    ConfigError names the field.
    """
    engine = VllmConfig(**given)
    return apply_gpus(
        gpus, engine, model, kv_dtype, has_blocks=not is_default(engine.num_gpu_blocks), has_timing=True
    )[0]
