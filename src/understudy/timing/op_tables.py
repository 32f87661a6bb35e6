"""Step times from op tables: microseconds of kernels by shape, as a profiler wrote them, interpolated.

Reads the layout of LLMServingSim's profiles, one folder a size of tensor parallelism:

    dense.csv         layer, tokens, time_us                of a layer's linear and elementwise kernels
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us      of a layer
    per_sequence.csv  layer, sequences, time_us             of the head and of sampling, once a step
    moe.csv           tokens, activated_experts, time_us    of a layer's experts, where it has some

each plain or gzipped; `meta.yaml` in the folder above says how uneven contexts were found to cost. The tables hold
kernels alone, launched one by one; an engine that schedules ahead hides the rest behind them, so nothing is added.
"""

from __future__ import annotations

import csv
import gzip
import io
from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import yaml

from understudy.errors import ConfigError
from understudy.timing.coefficients import CAPTURES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy._core import StepLoad
    from understudy.timing.deployment import Deployment
    from understudy.timing.efficiencies import Efficiencies

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_MICRO = 1e-3


class Curve:
    """A time by one number, linear between the points of a table."""

    def __init__(self, name: str, points: dict[int, float], extrapolate: bool) -> None:
        self._name = name
        self._at = sorted(points)
        self._us = [points[at] for at in self._at]
        self._extrapolate = extrapolate

    def us(self, value: float) -> float:
        """ConfigError beyond the last point, unless told to go on as between the last two."""
        at = self._at
        if value <= at[0]:
            return self._us[0]
        if value > at[-1] and not self._extrapolate:
            raise ConfigError(
                f"op tables: {self._name} ends at {at[-1]}, a step has {value:g}; extrapolate, or measure further"
            )
        right = min(max(bisect_right(at, value), 1), len(at) - 1)
        low, high = at[right - 1], at[right]
        share = (value - low) / (high - low)
        return self._us[right - 1] + share * (self._us[right] - self._us[right - 1])


class Grid:
    """A time by several numbers, linear in each between the points of a table."""

    def __init__(
        self, name: str, axes: tuple[str, ...], points: dict[tuple[int, ...], float], extrapolate: bool
    ) -> None:
        self._name = name
        self._names = axes
        self._axes = [sorted({point[axis] for point in points}) for axis in range(len(axes))]
        self._extrapolate = extrapolate
        self._us: NDArray[np.float64] = np.full([len(axis) for axis in self._axes], np.nan)
        for point, value in points.items():
            self._us[tuple(axis.index(at) for axis, at in zip(self._axes, point, strict=True))] = value

    def us(self, *values: float) -> float:
        """ConfigError outside the points, unless told to go on as at the border."""
        corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for axis, name, value in zip(self._axes, self._names, values, strict=True):
            if value > axis[-1] and not self._extrapolate:
                raise ConfigError(
                    f"op tables: {self._name} ends at {name}={axis[-1]}, a step has {value:g}; extrapolate, or measure "
                    "further"
                )
            right = min(max(bisect_right(axis, value), 1), len(axis) - 1) if len(axis) > 1 else 0
            if len(axis) == 1:
                corners = [((*index, 0), weight) for index, weight in corners]
                continue
            share = max((value - axis[right - 1]) / (axis[right] - axis[right - 1]), 0.0)
            corners = [
                part
                for index, weight in corners
                for part in (((*index, right - 1), weight * (1 - share)), ((*index, right), weight * share))
                if part[1] != 0
            ]
        total = sum(weight * float(self._us[index]) for index, weight in corners)
        if total != total:
            raise ConfigError(
                f"op tables: {self._name} has no point near "
                + ", ".join(f"{name}={value:g}" for name, value in zip(self._names, values, strict=True))
            )
        return max(total, 0.0)


class OpTables:
    """A timing model for `replay(timing=…)`: it is asked once a step."""

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        reached: Efficiencies,
        *,
        extrapolate: bool = False,
    ) -> None:
        """Read the tables of one folder. Communication between GPUs is the physical model's, with `reached`.

        ConfigError names the file and the column that is missing.
        """
        self._model = deployment.model
        self._skew = _skew(folder)
        self._ranks = deployment.parallel.data
        dense = _read(folder, "dense", ("layer", "tokens", "time_us"))
        self._layer = Curve("dense", _summed(dense, _ONCE, inside=False), extrapolate)
        self._once = Curve("dense", _summed(dense, _ONCE, inside=True), extrapolate)
        sequences = _read(folder, "per_sequence", ("layer", "sequences", "time_us"))
        self._head = Curve("per_sequence", _summed(sequences, (), inside=False), extrapolate)
        attention = _read(
            folder, "attention", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
        )
        points = {tuple(int(float(value)) for value in row[:4]): float(row[4]) for row in attention}
        powers = {
            point: value for point, value in points.items() if all(_is_power(number) for number in point)
        }
        axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        self._mixed = Grid(
            "attention", axes, {at: us for at, us in powers.items() if at[0] and at[2]}, extrapolate
        )
        self._prompts = Grid(
            "attention", axes[:2], {at[:2]: us for at, us in powers.items() if not at[2]}, extrapolate
        )
        self._decodes = Grid(
            "attention", axes[2:], {at[2:]: us for at, us in powers.items() if not at[0]}, extrapolate
        )
        self._experts = None
        if self._model.num_experts:
            moe = _read(folder, "moe", ("tokens", "activated_experts", "time_us"))
            table = {(int(row[0]), int(row[1])): float(row[2]) for row in moe}
            self._experts = _experts_curve(table, deployment, extrapolate)
        coefficients = deployment.coefficients(msgspec.structs.replace(reached, routing_ns=0.0))  # in moe.csv
        self._comm = (coefficients.comm_ms, coefficients.comm_token_ms, coefficients.comm_rank_token_ms)

    def step_ms(self, step: StepLoad, /) -> float:
        """Of the whole step."""
        layers = self._model.num_layers
        tokens = next((size for size in CAPTURES if size >= step.tokens), step.tokens)
        everybody = step.tokens * self._ranks
        layer = self._layer.us(tokens) + self._attention(step)
        if self._experts is not None:
            layer += self._experts.us(everybody)
        kernels = layers * layer + self._once.us(tokens) + self._head.us(step.requests)
        comm = self._comm[0] + self._comm[1] * tokens + self._comm[2] * step.tokens
        return kernels * _MICRO + comm

    def _attention(self, step: StepLoad) -> float:
        """Of a layer. Each prompt attends to itself alone; decodes are what they add to all prompts together."""
        chunks, decodes = step.chunks, step.decodes
        total = sum(self._prompts.us(new, history) for new, history in chunks)
        if not decodes:
            return total
        mean = step.context_tokens / decodes
        if not chunks:
            at_mean = self._decodes.us(decodes, mean)
            if not self._skew or step.longest_context <= mean:
                return at_mean
            return at_mean + self._skew * (self._decodes.us(decodes, step.longest_context) - at_mean)
        new = sum(tokens for tokens, _ in chunks)
        history = sum(tokens * behind for tokens, behind in chunks) / new
        at_mean = self._mixed.us(new, history, decodes, mean)
        if self._skew and step.longest_context > mean:
            at_mean += self._skew * (self._mixed.us(new, history, decodes, step.longest_context) - at_mean)
        return total + max(at_mean - self._prompts.us(new, history), 0.0)


def _experts_curve(table: dict[tuple[int, int], float], deployment: Deployment, extrapolate: bool) -> Curve:
    """Time of a layer's experts by tokens of all ranks: so many of the experts of this GPU are met."""
    model, parallel = deployment.model, deployment.parallel
    full: dict[tuple[int, ...], float] = dict(_filled(table).items())
    grid = Grid("moe", ("tokens", "activated_experts"), full, True)
    local = model.num_experts / parallel.expert
    share = model.experts_per_token / model.num_experts
    points = {}
    for tokens in sorted({at[0] for at in table}):
        met = max(local * (1 - (1 - share) ** tokens), 1.0)
        points[tokens] = grid.us(max(tokens / parallel.expert, 1.0), met)
    *_, before, last = sorted(points)
    # Twice as many tokens still meet experts that are all there is to meet: they go on as before.
    points[2 * last] = points[last] + (points[last] - points[before]) / (last - before) * last
    return Curve("moe", points, extrapolate)


def _filled(table: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Few tokens cannot meet many experts: such points take what the next larger batch takes."""
    tokens, experts = (sorted({at[axis] for at in table}) for axis in (0, 1))
    full = dict(table)
    for count in experts:
        known = [(at, table[at, count]) for at in tokens if (at, count) in table]
        for at in tokens:
            full.setdefault((at, count), next(value for size, value in known if size >= at))
    return full


def _summed(rows: list[list[str]], once: tuple[str, ...], *, inside: bool) -> dict[int, float]:
    """Time by size over all kinds of rows that are (or are not) in `once`; some run twice a layer."""
    points: dict[int, float] = {}
    for name, size, value in rows:
        if (name in once) == inside:
            points[int(size)] = points.get(int(size), 0.0) + float(value) * (2 if name in _TWICE else 1)
    return points or {1: 0.0, 2: 0.0}


def _skew(folder: Path) -> float:
    """Of decodes with uneven contexts: how far to go from the time at the mean context to that at the longest."""
    path = folder.parent / "meta.yaml"
    if not path.exists():
        return 0.0
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))["skew_fit"]
        if not found.get("enabled"):
            return 0.0
        return float(found["per_tp"][int(folder.name.removeprefix("tp"))]["alpha_default"])
    except (
        OSError,
        UnicodeDecodeError,
        yaml.YAMLError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise ConfigError(f"op tables: {path}: skew_fit: {error!r}") from error


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _read(folder: Path, name: str, columns: tuple[str, ...]) -> list[list[str]]:
    found = next(
        (path for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz") if path.exists()), None
    )
    if found is None:
        raise ConfigError(f"op tables: {folder} has no {name}.csv (or .csv.gz)")
    try:
        raw = found.read_bytes()
        text = (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8")
        reader = csv.reader(io.StringIO(text))
        header = next(reader, [])
        missing = [column for column in columns if column not in header]
        if missing:
            raise ConfigError(f"op tables: {found}: column {missing[0]} is missing")
        order = [header.index(column) for column in columns]
        rows = [[row[at] for at in order] for row in reader if row]
        for number, row in enumerate(rows, 2):
            if not (float(row[-1]) >= 0):
                raise ConfigError(f"op tables: {found}:{number}: time_us must not be negative, got {row[-1]}")
    except (OSError, EOFError, UnicodeDecodeError, ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"op tables: {found}: {error}") from error
    if not rows:
        raise ConfigError(f"op tables: {found} has no row below its header")
    return rows
