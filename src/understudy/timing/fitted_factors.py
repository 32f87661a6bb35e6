"""Factors on the numbers of a preset, by engine, GPUs, type and model; fitted to public measurements."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from understudy.timing.efficiencies import PEAKS

if TYPE_CHECKING:
    from understudy.timing.efficiencies import Efficiencies

FILE = Path(__file__).with_name("fitted_factors.json")
"""Written by benchmarks/fit_presets.py."""
GENERATIONS = {
    **dict.fromkeys(("H100", "H200", "H20", "GH200"), "Hopper"),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300"), "Blackwell"),
}
"""Generation of GPUs that share overheads; a GPU without one is alone."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What times are asked for."""

    engine: str
    gpu: str
    model: str
    weights: str
    has_experts: bool

    @property
    def generation(self) -> str:
        """Generation of the GPU."""
        return GENERATIONS.get(self.gpu, self.gpu)


class Factors(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Factors by the name of an efficiency, for targets that equal all fields that are given."""

    engine: str | None = None
    generation: str | None = None
    gpu: str | None = None
    model: str | None = None
    weights: str | None = None
    has_experts: bool | None = None
    factors: dict[str, float]

    def holds_for(self, target: Target) -> bool:
        """Whether the factors are those of a target."""
        names = ("engine", "generation", "gpu", "model", "weights", "has_experts")
        return all(getattr(self, name) in (None, getattr(target, name)) for name in names)


class FittedDeployment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A deployment that the factors were fitted to: its rows, and errors of them in percent (median, p90)."""

    model: str
    gpu: str
    engine: str
    weights: str
    rows: int
    releases: tuple[str, ...] = ()


class FittedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file."""

    factors: list[Factors]
    deployments: list[FittedDeployment]


def read_fitted() -> FittedFile:
    """Read the factors."""
    return _read(FILE)


@cache
def _read(path: Path) -> FittedFile:
    return msgspec.json.decode(path.read_bytes(), type=FittedFile)


def apply_factors(start: Efficiencies, target: Target) -> Efficiencies:
    """Multiply efficiencies by all factors of a target."""
    found = {name: getattr(start, name) for name in start.__struct_fields__}
    for one in read_fitted().factors:
        if one.holds_for(target):
            for name, factor in one.factors.items():
                found[name] *= factor
    # A share above 1 would absorb unmodelled effects of other models.
    reached = {name: min(value, 1.0) if name in PEAKS else value for name, value in found.items()}
    return msgspec.structs.replace(start, **{name: float(f"{value:.4g}") for name, value in reached.items()})


def find_deployment(target: Target) -> FittedDeployment | None:
    """Return the fitted deployment of a target; None if it was not measured."""
    wanted = (target.model, target.gpu, target.engine, target.weights)
    return next(
        (one for one in read_fitted().deployments if (one.model, one.gpu, one.engine, one.weights) == wanted),
        None,
    )
