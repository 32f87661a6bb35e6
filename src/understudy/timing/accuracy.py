"""Errors of predictions near a deployment, and the range of an answer that follows from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from understudy.timing.engine_names import ENGINES
from understudy.timing.fitted_factors import Target
from understudy.timing.known_models import MODELS

FILE = Path(__file__).with_name("fitted_errors.json")
"""Written by tools/write_accuracy.py from benchmarks/leave_one_out.py."""
NEIGHBOURS = 3
_WORTH = {"model": 4, "engine": 4, "has_experts": 3, "gpu": 2, "generation": 2, "weights": 1}
"""How near a deployment is that shares a property."""


class Error(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of |predicted / measured - 1| over rows, in percent."""

    median: float
    p90: float

    def text(self) -> str:
        """Return both in words."""
        return f"{self.median:.1f} %, {self.p90:.0f} %"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of TPOT and TTFT; None where none can be scored."""

    tpot: Error
    ttft: Error | None = None


class MeasuredErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a measured deployment: with its own numbers, and with what is left without it."""

    model: str
    gpu: str
    engine: str
    weights: str
    rows: int
    own: Errors
    left_out: Errors | None = None
    """None: its numbers are the start of all others (vLLM's dense models), and are not fitted again."""

    @property
    def target(self) -> Target:
        """The deployment as a target of presets."""
        return Target(
            engine=self.engine,
            gpu=self.gpu,
            model=self.model,
            weights=self.weights,
            has_experts=bool(MODELS[self.model].num_experts),
        )

    def describe(self) -> str:
        """Return the name of the deployment."""
        return f"{self.model} in {self.weights} on {self.gpu} with {ENGINES[self.engine]}"


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured near a deployment."""

    target: Target
    own: MeasuredErrors | None
    """The deployment itself, if it was measured."""
    near: tuple[MeasuredErrors, ...]
    """Its neighbours, the nearest first; none if no GPU of its generation was measured."""

    @property
    def tpot_percent(self) -> float | None:
        """Range of TPOT: nine of ten measured rows were within it; None: not known."""
        return self._range("tpot")

    @property
    def ttft_percent(self) -> float | None:
        """Range of TTFT."""
        return self._range("ttft")

    def text(self) -> str:
        """Describe the range in one sentence without an end."""
        if self.tpot_percent is None:
            return "no error is known: nothing near it was measured"
        first = "not known" if self.ttft_percent is None else f"± {self.ttft_percent:.0f} %"
        if self.own is not None:
            of = f"its {self.own.rows} measured rows"
        else:
            known = all(one.left_out is not None for one in self.near)
            names = ", ".join(dict.fromkeys(one.model for one in self.near))
            of = f"rows of {names}{', predicted without them' if known else ''}"
        return f"range TPOT ± {self.tpot_percent:.0f} %, TTFT {first} (nine of ten {of})"

    def _range(self, name: str) -> float | None:
        if self.own is not None:
            found = [getattr(self.own.own, name)]
        else:
            found = [getattr(one.left_out or one.own, name) for one in self.near]
        known = sorted(one.p90 for one in found if one is not None)
        return known[len(known) // 2] if known else None


def find_accuracy(target: Target) -> Accuracy:
    """Return the errors that were measured for a deployment, or for its neighbours."""
    known = read_errors()
    own = next((one for one in known if one.target == target), None)
    there = [one for one in known if one.target.generation == target.generation and one is not own]
    near = sorted(there, key=lambda one: -_nearness(one.target, target))[:NEIGHBOURS]
    return Accuracy(target=target, own=own, near=tuple(near))


def _nearness(one: Target, other: Target) -> int:
    return sum(worth for name, worth in _WORTH.items() if getattr(one, name) == getattr(other, name))


@cache
def read_errors() -> tuple[MeasuredErrors, ...]:
    """Read the errors of all measured deployments."""
    return msgspec.json.decode(FILE.read_bytes(), type=tuple[MeasuredErrors, ...])
