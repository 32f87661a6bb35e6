"""Numbers fitted to a part of the rows, and numbers of another GPU, scored on rows that they did not see."""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid

from measured.errors import spread
from measured.fit_set import STRATA
from understudy.calibrate.tables import Table
from understudy.timing import dense_presets, expert_presets
from understudy.timing.efficiencies import Efficiencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from understudy.calibrate.experiment import Experiment
    from understudy.timing.coefficients import StepCoefficients

    Vector = NDArray[np.float64]

FAMILIES = {
    "Llama-3.1-70B fp8, Hopper": ("Llama-3.1-70B", ("H100", "H200"), "fp8", 4),
    "Llama-3.1-70B fp8, B200": ("Llama-3.1-70B", ("B200",), "fp8", 4),
    "Llama-3.1-70B nvfp4, B200": ("Llama-3.1-70B", ("B200",), "nvfp4", 4),
    "gpt-oss-120b, H100": ("gpt-oss-120b", ("H100",), "mxfp4", 4),
    "gpt-oss-120b, H200": ("gpt-oss-120b", ("H200",), "mxfp4", 2),
    "gpt-oss-120b, B200": ("gpt-oss-120b", ("B200",), "mxfp4", 2),
    "MiniMax-M2.5 fp8, B200": ("MiniMax-M2.5", ("B200",), "fp8", None),
    "MiniMax-M2.5 nvfp4, B200": ("MiniMax-M2.5", ("B200",), "nvfp4", 2),
    "MiniMax-M2.5 fp8, H100": ("MiniMax-M2.5", ("H100",), "fp8", None),
}
"""Model, GPUs, type of weights, and the size of tensor parallelism that is left out once."""
SCORED = (8, 32, 128)
"""Concurrencies that are left out."""
ROUND = Efficiencies(
    weights=0.7,
    compute=0.45,
    kv=0.7,
    experts=0.8,
    expert_compute=0.12,
    routing_ns=50.0,
    link=0.45,
    link_latency_us=12.0,
    step_ms=1.2,
    layer_us=6.0,
    sequence_us=10.0,
    prefill_ms=1.2,
    floor_ms_per_layer=0.5,
    front_end_ms=6.4,
)
"""Where every refit starts: no family's preset, so that nothing of the rows left out comes in by the prior."""
DENSE_NUMBERS = ("weights", "compute", "kv", "step_ms", "sequence_us", "prefill_ms", "front_end_ms")
EXPERT_NUMBERS = ("experts", "expert_compute", "routing_ns", "kv", "step_ms", "sequence_us", "front_end_ms")
SPREAD, NOISE, ROBUST, DIFFERENCE = 0.5, 0.04, 0.1, 0.06
"""Of the logarithm of a number about its start; of a residual, and where it begins to count linearly; of a slope."""
MEASURES = {"tpot_ms": 1.5, "itl_ms": 1.5, "ttft_ms": 0.5}
"""What is compared, as far as it was measured, and how much it weighs."""
ITERATIONS = 3
STAGE_S = 120.0
"""Of constant rates, what a fit replays of each stage; scored are all 600 s."""


class Split(NamedTuple):
    """Rows to fit, and rows to score."""

    family: str
    left_out: str
    seen: list[Experiment]
    others: list[Experiment]


def refitted(closed: Table, stages: Table, only: str) -> Grid:
    """Families (those with `only` in their name), each fitted from the same round numbers to a part of its rows."""
    grid = _grid("fitted anew to a part of the rows, from round numbers: the other rows")
    found = [split for split in (*_closed_loops(closed), *_by_model(stages)) if only in split.family]
    together: dict[tuple[str, str], _Errors] = defaultdict(_Errors)
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        whole = bar.add_task("families", total=len(found))
        for split in found:
            one = bar.add_task(f"{split.family}, without {split.left_out}", total=None)
            reached = _fit(split.seen, partial(bar.advance, one))
            errors = _score(grid, split, partial(_predict, reached=reached))
            group = STRATA.get(FAMILIES[split.family][0], "") if split.family in FAMILIES else ""
            together[group, split.left_out.partition(" ")[0]].add(errors)
            bar.remove_task(one)
            bar.advance(whole)
    grid.add_section()
    for (group, left_out), errors in together.items():
        if group and left_out in ("concurrencies", "TP"):
            grid.add_row(f"all of {group}", left_out, "", str(len(errors.tokens)), *errors.cells())
    return grid


def stand_ins(closed: Table, stages: Table) -> Grid:
    """Presets without the numbers of a GPU: those of the nearest that is left stand in, as for one never measured."""
    grid = _grid("presets without what was measured on a GPU: its rows")
    rows = [table.experiment(index) for table in (closed, stages) for index in range(len(table.rows))]
    for model, kind, gpu in expert_presets.EXPERTS:
        here = [one for one in rows if _is(one, model, (gpu,), kind)]
        if not here or not any(
            other[1] == kind and other != (model, kind, gpu) for other in expert_presets.EXPERTS
        ):
            continue  # nobody else has experts of that type
        left = {name: value for name, value in expert_presets.EXPERTS.items() if name != (model, kind, gpu)}
        with patch.dict(expert_presets.EXPERTS, left, clear=True):
            split = Split(f"{model} {kind}", f"its experts on {gpu}", [], here)
            try:
                _score(grid, split, lambda row: row.predict(row.preset().efficiencies))
            except KeyError:
                continue  # the only stand-in is the one that was left out
    for gpu in ("A100", "L40S"):
        here = [one for one in rows if one.deployment.gpu.name == gpu]
        left_dense = {name: value for name, value in dense_presets.DENSE.items() if name[0] != gpu}
        with patch.dict(dense_presets.DENSE, left_dense, clear=True):
            split = Split("BLIS, dense", f"all of {gpu}: shares as on Hopper", [], here)
            _score(grid, split, lambda row: row.predict(row.preset().efficiencies))
    return grid


def _predict(one: Experiment, reached: Efficiencies) -> dict[str, float]:
    return one.predict(reached)


def _closed_loops(table: Table) -> list[Split]:
    """By concurrency, by size of tensor parallelism, by GPU."""
    everything = [table.experiment(index) for index in range(len(table.rows))]
    splits = []
    for family, (model, gpus, weights, tensor) in FAMILIES.items():
        members = [one for one in everything if _is(one, model, gpus, weights)]
        rules: dict[str, Callable[[Experiment], bool]] = {
            "concurrencies": lambda one: one.loads[0].concurrency in SCORED
        }
        if tensor is not None:
            rules[f"TP {tensor}"] = lambda one, tensor=tensor: one.deployment.parallel.tensor == tensor  # type: ignore[misc]
        for gpu in gpus if len(gpus) > 1 else ():
            rules[gpu] = lambda one, gpu=gpu: one.deployment.gpu.name == gpu  # type: ignore[misc]
        splits += [_split(family, name, members, rule) for name, rule in rules.items()]
    return splits


def _by_model(table: Table) -> list[Split]:
    """Constant rates of dense models on H100, by model."""
    rows = [
        {**row, "stage_seconds": " ".join(str(min(float(s), STAGE_S)) for s in row["stage_seconds"].split())}
        for row in table.rows
    ]
    short = Table(table.path, table.layout, rows)
    splits = []
    for model in ("Llama-2-70B", "Llama-3.1-8B"):
        places = [
            place
            for place in range(len(rows))
            if (one := short.experiment(place)).deployment.gpu.name == "H100"
            and not one.deployment.model.num_experts
        ]
        seen = [short.experiment(place) for place in places]
        others = [table.experiment(place) for place in places]
        splits.append(
            Split(
                "BLIS, dense fp16, H100",
                model,
                [one for one in seen if one.deployment.model.name != model],
                [one for one in others if one.deployment.model.name == model],
            )
        )
    return splits


def _split(family: str, name: str, members: list[Experiment], rule: Callable[[Experiment], bool]) -> Split:
    others = [one for one in members if rule(one)]
    return Split(family, name, [one for one in members if not rule(one)], others)


def _is(one: Experiment, model: str, gpus: tuple[str, ...], weights: str) -> bool:
    what = one.deployment
    return what.model.name == model and what.gpu.name in gpus and what.weights == weights


def _fit(members: list[Experiment], progress: Callable[[], None]) -> Efficiencies:
    """The numbers of a preset, fitted to these rows."""
    names = list(EXPERT_NUMBERS if members[0].deployment.model.num_experts else DENSE_NUMBERS)
    start = ROUND
    if members[0].deployment.gpu.name == "B200":
        names.append("floor_ms_per_layer")
    else:
        start = msgspec.structs.replace(start, floor_ms_per_layer=0.0)
    if any(one.deployment.parallel.tensor > 1 for one in members):
        names += ["link", "link_latency_us"]
    rows = [_Row(one) for one in members]

    def residuals(values: Vector) -> Vector:
        reached = msgspec.structs.replace(start, **dict(zip(names, map(float, values), strict=True)))
        progress()
        return np.concatenate([row.residuals(reached) for row in rows])

    found = _descend(residuals, np.array([getattr(start, name) for name in names]))
    return msgspec.structs.replace(start, **dict(zip(names, map(float, found), strict=True)))


def _descend(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Least squares in logarithms as `calibrate` has them, with differences to one side: no uncertainty is asked for,
    and each of its steps is a replay of all rows."""
    origin = at = np.log(start)
    left = residuals(start)
    pull = (NOISE / SPREAD) ** 2
    for _ in range(ITERATIONS):
        ways = np.eye(len(at)) * DIFFERENCE
        slope = np.stack([(residuals(np.exp(at + way)) - left) / DIFFERENCE for way in ways], axis=1)
        weights = np.minimum(1.0, ROBUST / np.maximum(np.abs(left), 1e-12))
        normal = slope.T @ (weights[:, None] * slope) + pull * np.eye(len(at))
        step = np.linalg.solve(normal, -slope.T @ (weights * left) - pull * (at - origin))
        before = _cost(left, at - origin, pull)
        for shorter in (1.0, 0.5, 0.2):
            tried = at + shorter * np.clip(step, -0.7, 0.7)
            then = residuals(np.exp(tried))
            if _cost(then, tried - origin, pull) < before:
                at, left = tried, then
                break
        else:
            break
    return np.exp(at)


def _cost(left: Vector, moved: Vector, pull: float) -> float:
    size = np.abs(left)
    loss = np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2))
    return float(loss.sum() + pull * (moved**2).sum() / 2)


class _Row:
    """A row of one draw of its lengths; what it was asked already it knows: most numbers are none of its step's."""

    def __init__(self, one: Experiment) -> None:
        self._one = msgspec.structs.replace(one, loads=one.loads[:1])
        self._known: dict[tuple[StepCoefficients, float], Vector] = {}

    def residuals(self, reached: Efficiencies) -> Vector:
        asked = self._one.deployment.coefficients(reached), reached.front_end_ms
        if asked not in self._known:
            found = self._one.predict(reached)
            self._known[asked] = np.array(
                [
                    weight * np.log(found[key] / self._one.measurement(key))
                    for key, weight in MEASURES.items()
                    if key in self._one.measured
                ]
            )
        return self._known[asked]


def _grid(title: str) -> Grid:
    grid = Grid(title=title, title_justify="left")
    names = ("family", "left out", "rows fitted", "rows scored", "TPOT or ITL", "p90", "TTFT", "p90")
    for name in names:
        grid.add_column(name, justify="left" if name in names[:2] else "right")
    return grid


class _Errors:
    """Of times between tokens, and to the first one."""

    def __init__(self) -> None:
        self.tokens: list[float] = []
        self.first: list[float] = []

    def add(self, other: _Errors) -> None:
        self.tokens += other.tokens
        self.first += other.first

    def cells(self) -> tuple[str, ...]:
        return *spread(self.tokens), *spread(self.first)


def _score(grid: Grid, split: Split, predict: Callable[[Experiment], dict[str, float]]) -> _Errors:
    errors = _Errors()
    for one in split.others:
        found = predict(one)
        between = "itl_ms" if "itl_ms" in one.measured else "tpot_ms"
        errors.tokens.append(found[between] / one.measurement(between) - 1)
        errors.first.append(found["ttft_ms"] / one.measurement("ttft_ms") - 1)
    counts = str(len(split.seen) or "–"), str(len(split.others))
    grid.add_row(split.family, split.left_out, *counts, *errors.cells())
    return errors
