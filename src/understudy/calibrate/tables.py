"""Read tables of experiments, one per row: closed loops of random lengths (InferenceX) or constant rates (BLIS)."""

from __future__ import annotations

import csv
import math
import operator
import re
from typing import TYPE_CHECKING, Literal

from understudy.calibrate.experiment import Experiment, build_engine_config, count_draws
from understudy.calibrate.load import constant_stages, random_lengths
from understudy.defaults import LEAST_LENGTH
from understudy.engines.profiles import find_memory_share
from understudy.errors import ConfigError, InvalidArgument, UnderstudyError
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.weight_types import weight_type

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.timing.architecture import Architecture

Layout = Literal["closed_loop", "stages"]

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
}
_PROMPTS_PER_SLOT = 10
_MAX_STAGE_S = 600.0
_MAX_COUNT = 10_000_000
_MAX_REQUESTS = 1_000_000
"""Limit of one experiment, to check its rates before sampling from them."""
_EMPTY = ("nan", "none", "null", "na", "n/a", "<na>", "-")
"""Texts that mean an empty cell."""


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
        layout: Layout = "stages" if "exp_id" in columns else "closed_loop"
        missing = [name for name in _NEEDS[layout] if name not in columns]
        if missing:
            raise ConfigError(
                f"{path}: column {missing[0]} is missing; a table has either key, system, model_path, … (closed "
                "loops) or exp_id, model, hardware, … (constant rates)"
            )
        if not rows:
            raise ConfigError(f"{path} has no row below its header")
        return cls(path, layout, rows)

    @property
    def columns_out(self) -> tuple[str, ...]:
        """Header of the predictions."""
        if self.layout == "stages":
            return ("exp_id", "ttft_ms", "itl_ms", "e2e_ms")
        return ("key", "ttft_ms", "tpot_ms")

    def experiment(self, index: int) -> Experiment:
        """Build the experiment of one row. InvalidArgument names file, line, column and problem."""
        row = _Row(f"{self.path}:{index + 2}", self.rows[index])
        try:
            return _read_closed_loop(row) if self.layout == "closed_loop" else _read_stages(row)
        except UnderstudyError as error:
            text = str(error)
            raise InvalidArgument(text if text.startswith(row.where) else f"{row.where}: {text}") from error


class _Row:
    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where = where
        self.cells = cells

    def text(self, name: str, *others: str, default: str | None = None) -> str:
        """Return the first non-empty cell of these columns."""
        for column in (name, *others):
            if value := self._cell(column):
                return value
        if default is None:
            written = (self.cells.get(name) or "").strip()
            what = f"{written!r}, which means empty" if written else "empty"
            raise InvalidArgument(f"{self.where}: {name} is {what}; fill the cell")
        return default

    def number(self, name: str) -> float:
        return self._number(name, self.text(name))

    def count(self, name: str, default: int | None = None) -> int:
        if default is not None and not self._cell(name):
            return default
        value = self.number(name)
        if value != int(value) or value > _MAX_COUNT:
            raise InvalidArgument(
                f"{self.where}: {name} must be a whole number up to {_MAX_COUNT:,}, got {value:g}"
            )
        return int(value)

    def numbers(self, name: str) -> list[float]:
        return [self._number(name, part) for part in re.split(r"[\s,;|\[\]]+", self.text(name)) if part]

    def measured(self, *names: str) -> dict[str, str]:
        """Return the non-empty cells of measurements, unparsed, because predictions do not depend on them."""
        return {name: self._cell(name) for name in names if self._cell(name)}

    def _cell(self, name: str) -> str:
        """Return the text of a cell; empty for spreadsheet words such as nan."""
        text = (self.cells.get(name) or "").strip()
        return "" if text.lower() in _EMPTY else text

    def _number(self, name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InvalidArgument(f"{self.where}: {name} must be a number, got {text!r}") from None
        if not (math.isfinite(value) and value > 0):
            raise InvalidArgument(f"{self.where}: {name} must be finite and above 0, got {text}")
        return value


def _read_closed_loop(row: _Row) -> Experiment:
    model = find_architecture(row.text("model_path"))
    deployment = Deployment(
        model=model,
        gpu=find_gpu(row.text("system")),
        weights=_read_weight_type(row, model, "quant", "precision"),
        kv=row.text("kv_cache_dtype", default="auto"),
        parallel=_read_parallelism(row, model),
    )
    release = row.text("backend_version", default="")
    concurrency = _read_concurrency(row)
    prompts = _PROMPTS_PER_SLOT * concurrency
    _check_requests(row, "conc", prompts)
    loads = tuple(
        random_lengths(
            row.count("isl"),
            row.count("osl"),
            least=LEAST_LENGTH,
            concurrency=concurrency,
            prompts=prompts,
            seed=seed,
        )
        for seed in range(count_draws(concurrency, prompts))
    )
    return Experiment(
        name=row.text("key"),
        deployment=deployment,
        engine=build_engine_config(
            deployment,
            gpu_memory_utilization=find_memory_share(release),
            **_read_limits(row),
            enable_prefix_caching=False,
        ),
        loads=loads,
        measured=row.measured("ttft_ms", "tpot_ms"),
        release=release,
        where=row.where,
    )


def _read_limits(row: _Row) -> dict[str, int]:
    """Return the limits of the engine that a row has."""
    names = ("max_num_seqs", "max_num_batched_tokens")
    return {name: row.count(name) for name in names if row.text(name, default="")}


def _check_requests(row: _Row, column: str, requests: float) -> None:
    if not 1 <= requests <= _MAX_REQUESTS:
        raise InvalidArgument(
            f"{row.where}: {column} gives {requests:,.0f} requests; 1 to {_MAX_REQUESTS:,} are supported"
        )


def _read_weight_type(row: _Row, model: Architecture, *columns: str) -> str:
    """Return the weight type that a row names, or the model's own."""
    named = row.text(*columns, default="auto")
    if named.lower() == "auto":
        return model.weights
    kind = weight_type(named).name
    # For an mxfp4 model, "fp4" can only mean mxfp4.
    return "mxfp4" if model.weights == "mxfp4" and kind == "nvfp4" else kind


def _read_parallelism(row: _Row, model: Architecture) -> Parallelism:
    """Read the parallel sizes; experts on more GPUs than a rank has mean several ranks."""
    tensor = row.count("tp_size", 1)
    if not model.num_experts:
        return Parallelism(tensor=tensor)
    expert = row.count("moe_ep_size", 1)
    gpus = row.count("moe_tp_size", max(tensor // expert, 1)) * expert
    if gpus % tensor:
        raise InvalidArgument(
            f"{row.where}: moe_tp_size · moe_ep_size = {gpus} is not a multiple of tp_size={tensor}"
        )
    return Parallelism(tensor=tensor, data=gpus // tensor, expert=expert)


def _read_concurrency(row: _Row) -> int:
    """Return the column conc, else the concurrency in the key (..._c64_...)."""
    named = re.search(r"_c(\d+)(?:_|#|$)", row.text("key"))
    return row.count("conc", int(named[1]) if named else None)


def _read_stages(row: _Row) -> Experiment:
    model = find_architecture(row.text("model"))
    deployment = Deployment(
        model=model,
        gpu=find_gpu(row.text("hardware")),
        weights=_read_weight_type(row, model, "dtype"),
        parallel=Parallelism(tensor=row.count("tp", 1)),
    )
    rates, seconds = row.numbers("stage_rates_per_s"), row.numbers("stage_seconds")
    if len(rates) != len(seconds):
        raise InvalidArgument(
            f"{row.where}: stage_rates_per_s has {len(rates)} stages, but stage_seconds has {len(seconds)}"
        )
    max_tokens = row.count("max_tokens")
    counted = row.text("client_output_tokens", default="")
    # A few minutes of a steady load are enough: shorten all stages by one factor.
    longest = max(seconds)
    seconds = [one * min(1.0, _MAX_STAGE_S / longest) for one in seconds]
    _check_requests(row, "stage_rates_per_s", sum(map(operator.mul, rates, seconds)))
    load = constant_stages(
        row.count("prompt_tokens"),
        max_tokens,
        rates_per_s=rates,
        stage_seconds=seconds,
        distinct_prompts=row.count("distinct_prompts"),
    )
    return Experiment(
        name=row.text("exp_id"),
        deployment=deployment,
        engine=build_engine_config(
            deployment,
            **_read_limits(row),
            max_model_len=row.count("max_model_len") if row.text("max_model_len", default="") else None,
            enable_prefix_caching=True,
        ),
        loads=(load,),
        measured=row.measured("ttft_ms", "itl_ms", "e2e_ms"),
        where=row.where,
        client_output_tokens=row.number("client_output_tokens") if counted else float(max_tokens),
    )
