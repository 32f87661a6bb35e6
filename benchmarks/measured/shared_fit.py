"""Fit factors on presets that deployments share: of engines, GPU generations, types and models.

A number of a preset, such as the time of a launch, is a start (op tables, vLLM's dense presets) times the factors of
all groups that a deployment is in. All logarithms are found together, by least squares with a prior for each group, so
that a deployment which was never measured has the factors of its neighbours. Predictions are those of `quick_times`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from measured.deployments import Deployed
from measured.quick_times import ClosedLoop, QuickTimes
from understudy.timing.expert_presets import EXPERTS
from understudy.timing.fitted_factors import Factors, FittedDeployment, FittedFile, Target
from understudy.timing.known_models import MODELS
from understudy.timing.presets import find_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from understudy.calibrate.experiment import Experiment
    from understudy.timing.efficiencies import Efficiencies

    Vector = NDArray[np.float64]

OVERHEADS = (
    *("routing_ns", "link_latency_us", "step_ms", "layer_us", "prefill_ms", "floor_ms_per_layer"),
    "front_end_ms",
)
SHARES = ("weights", "compute", "kv", "experts", "expert_compute", "link")
NUMBERS = (*SHARES, *OVERHEADS)
_OF_EXPERTS = ("experts", "expert_compute", "routing_ns")
ROWS = 18
"""Most rows of a deployment that are fitted, so that no deployment outweighs the others."""
NOISE, ROBUST, DIFFERENCE, WEIGHT_OF_TTFT = 0.03, 0.12, 0.04, 0.35
ITERATIONS = 6
SMALLEST = 0.01
"""Logarithms below it are left out of the file."""


class Group(NamedTuple):
    """Deployments that share factors, and the spreads of their logarithms: of overheads, and of shares of peaks."""

    keys: tuple[tuple[str, Any], ...]
    overheads: float
    shares: float

    def spread(self, number: str) -> float:
        """Return the spread of a number's logarithm."""
        return self.overheads if number in OVERHEADS else self.shares


def list_groups(target: Target) -> list[Group]:
    """Return the groups of a deployment, from the largest on; none for vLLM's dense models, which are the start."""
    own = {name: getattr(target, name) for name in target.__struct_fields__} | {
        "generation": target.generation
    }
    if target.engine == "vllm" and not target.has_experts:
        return []
    wanted: list[tuple[tuple[str, ...], float, float]] = [
        (("engine", "generation", "has_experts"), 0.15, 0.08),
        (("engine", "generation", "weights", "has_experts"), 0.1, 0.08),
        (("model",), 0.4, 0.2),
    ]
    if target.has_experts:
        wanted += [(("has_experts",), 0.5, 0.2), (("model", "generation", "weights"), 0.05, 0.05)]
    if target.engine != "vllm":
        wanted.append((("engine",), 0.7, 0.25))
    return [
        Group(tuple((name, own[name]) for name in names), overheads, shares)
        for names, overheads, shares in wanted
    ]


class _Row(NamedTuple):
    one: Experiment
    name: Deployed
    target: Target
    loop: ClosedLoop
    tpot_ms: float
    ttft_ms: float | None
    weight: float


class SharedFit:
    """Factors fitted to rows, and those without one deployment."""

    def __init__(self, rows: Iterable[tuple[Experiment, dict[str, str]]], *, seed: int = 1) -> None:
        self._releases: dict[Deployed, set[str]] = defaultdict(set)
        self._counts: dict[Deployed, int] = defaultdict(int)
        self._targets: dict[Deployed, Target] = {}
        self.rows = self._choose(rows, seed)
        self._presets = [self._preset(row) for row in self.rows]
        self._starts = [
            np.log([max(getattr(one, number), 1e-9) for number in NUMBERS]) for one in self._presets
        ]
        places: dict[tuple[Group, str], int] = {}
        self._use: list[list[tuple[int, int]]] = []
        for row in self.rows:
            own = [
                (number, group)
                for group in list_groups(row.target)
                for number in NUMBERS
                if row.target.has_experts or number not in _OF_EXPERTS
            ]
            self._use.append(
                [
                    (NUMBERS.index(number), places.setdefault((group, number), len(places)))
                    for number, group in own
                ]
            )
        self._places = places
        self._spreads = np.array([group.spread(number) for group, number in places])
        self._found: Vector = np.zeros(len(places))
        self._left: Vector = np.zeros(0)
        self._slope: Vector = np.zeros(0)

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Fit all factors; `progress` gets the median error of TPOT before each step."""
        self._left, self._slope = self._linearise()
        for _ in range(ITERATIONS):
            if progress is not None:
                progress(float(np.median(np.abs(self._left[:, 0]))))
            before, found = self._cost(self._left), self._found
            way = self._solve(np.ones(len(self.rows)))
            for step in (0.8, 0.4, 0.15):
                self._found = found + step * way
                left = self._residuals(self._moved())
                if self._cost(left) < before:
                    break
            self._left, self._slope = self._linearise()

    def factors(self, without: Deployed | None = None) -> list[Factors]:
        """Return the factors of all groups, without the rows of a deployment if one is named."""
        found = self._found
        if without is not None:
            mask = np.array([float(row.name != without) for row in self.rows])
            found = found + self._solve(mask)
        groups: dict[Group, dict[str, float]] = defaultdict(dict)
        for (group, number), place in self._places.items():
            if abs(found[place]) >= SMALLEST:
                groups[group][number] = float(f"{math.exp(found[place]):.4g}")
        return [Factors(**dict(group.keys), factors=values) for group, values in groups.items()]

    def without(self, name: Deployed) -> FittedFile:
        """Return the fitted file of all other deployments."""
        others = [one for one in sorted({row.name for row in self.rows}) if one != name]
        own = [self.own_factors(one) for one in others if not is_start(one)]
        deployments = [
            one for one in self.deployments() if (one.model, one.gpu, one.engine, one.weights) != tuple(name)
        ]
        return FittedFile(factors=[*self.factors(name), *own], deployments=deployments)

    def fitted(self) -> FittedFile:
        """Return the fitted file."""
        own = [self.own_factors(one) for one in sorted({row.name for row in self.rows}) if not is_start(one)]
        return FittedFile(factors=[*self.factors(), *own], deployments=self.deployments())

    def own_factors(self, name: Deployed) -> Factors:
        """Return the further factors of a measured deployment, from its own rows."""
        places = [place for place, row in enumerate(self.rows) if row.name == name]
        spread = np.array([0.25 if number in OVERHEADS else 0.15 for number in NUMBERS])
        left, slope = self._left[places].reshape(-1), self._slope[places].reshape(-1, len(NUMBERS))
        weight = np.array([(1.0, WEIGHT_OF_TTFT) for _ in places]).reshape(-1)
        moved = _least_squares(slope, left, weight, np.zeros(len(NUMBERS)), spread)
        usable = [
            number for number in NUMBERS if self._targets[name].has_experts or number not in _OF_EXPERTS
        ]
        values = {number: float(moved[NUMBERS.index(number)]) for number in usable}
        return Factors(
            model=name.model,
            gpu=name.gpu,
            engine=name.engine,
            weights=name.weights,
            factors={n: float(f"{math.exp(v):.4g}") for n, v in values.items() if abs(v) >= SMALLEST},
        )

    def deployments(self) -> list[FittedDeployment]:
        """Return the deployments of all rows."""
        return [
            FittedDeployment(
                **name._asdict(),
                rows=count,
                releases=tuple(sorted(one for one in self._releases[name] if one)),
            )
            for name, count in sorted(self._counts.items())
        ]

    def _choose(self, rows: Iterable[tuple[Experiment, dict[str, str]]], seed: int) -> list[_Row]:
        groups: dict[Deployed, list[_Row]] = defaultdict(list)
        for one, cells in rows:
            what = one.deployment
            name = Deployed.of(one)
            target = Target(**name._asdict(), has_experts=bool(what.model.num_experts))
            first = float(cells["ttft_ms"]) if cells.get("ttft_usable", "1") == "1" else None
            self._releases[name].add(one.release)
            self._counts[name] += 1
            self._targets[name] = target
            groups[name].append(
                _Row(one, name, target, ClosedLoop.of(one), float(cells["tpot_ms"]), first, 1.0)
            )
        draw = np.random.default_rng(seed)
        chosen: list[_Row] = []
        for own in groups.values():
            places = sorted(draw.choice(len(own), min(len(own), ROWS), replace=False).tolist())
            chosen += [own[place] for place in places]
        return chosen

    def _preset(self, row: _Row) -> Efficiencies:
        what = row.one.deployment
        return find_start(what.model, what.gpu, what.weights, what.kv, engine=row.one.backend).efficiencies

    def _residuals(self, moved: Vector) -> Vector:
        found = np.zeros((len(self.rows), 2))
        for place, row in enumerate(self.rows):
            values = np.exp(self._starts[place] + moved[place])
            values[: len(SHARES)] = np.minimum(values[: len(SHARES)], 1.0)
            reached = msgspec.structs.replace(
                self._presets[place], **dict(zip(NUMBERS, map(float, values), strict=True))
            )
            tpot, ttft = QuickTimes(row.one.deployment.coefficients(reached), row.loop).means(
                reached.front_end_ms
            )
            found[place, 0] = math.log(tpot / row.tpot_ms)
            found[place, 1] = 0.0 if row.ttft_ms is None else math.log(ttft / row.ttft_ms)
        return found

    def _moved(self) -> Vector:
        moved = np.zeros((len(self.rows), len(NUMBERS)))
        for place, own in enumerate(self._use):
            for number, index in own:
                moved[place, number] += self._found[index]
        return moved

    def _cost(self, left: Vector) -> float:
        size = np.abs(left) * np.array([1.0, WEIGHT_OF_TTFT])
        loss = np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2))
        return float(loss.sum() / NOISE**2 + ((self._found / self._spreads) ** 2).sum() / 2)

    def _linearise(self) -> tuple[Vector, Vector]:
        moved = self._moved()
        left = self._residuals(moved)
        slope = np.zeros((len(self.rows), 2, len(NUMBERS)))
        for number in range(len(NUMBERS)):
            way = moved.copy()
            way[:, number] += DIFFERENCE
            slope[:, :, number] = (self._residuals(way) - left) / DIFFERENCE
        return left, slope

    def _solve(self, mask: Vector) -> Vector:
        matrix = np.zeros((2 * len(self.rows), len(self._places)))
        for place, own in enumerate(self._use):
            for number, index in own:
                matrix[2 * place, index] += self._slope[place, 0, number]
                matrix[2 * place + 1, index] += self._slope[place, 1, number]
        weight = np.stack([mask, WEIGHT_OF_TTFT * mask], axis=1).reshape(-1)
        return _least_squares(matrix, self._left.reshape(-1), weight, self._found, self._spreads)


def is_start(name: Deployed) -> bool:
    """Whether a preset of vLLM is of this deployment alone, or of dense models."""
    return name.engine == "vllm" and (
        (name.model, name.weights, name.gpu) in EXPERTS or not MODELS[name.model].num_experts
    )


def _least_squares(slope: Vector, left: Vector, weight: Vector, at: Vector, spread: Vector) -> Vector:
    """Return the move that minimises the linear residuals, robustly, with a prior about no factor."""
    moved: Vector = np.zeros(slope.shape[1])
    for _ in range(3):
        size = np.abs(left + slope @ moved)
        scaled = weight * np.sqrt(np.minimum(1.0, ROBUST / np.maximum(size, 1e-9))) / NOISE
        rows = slope * scaled[:, None]
        normal = rows.T @ rows + np.diag(1 / spread**2)
        moved = np.asarray(
            -np.linalg.solve(normal, rows.T @ (scaled * left) + at / spread**2), dtype=np.float64
        )
    clipped: Vector = np.clip(moved, -0.8, 0.8)
    return clipped
