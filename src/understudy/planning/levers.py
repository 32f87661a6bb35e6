"""Levers: changes of the question that double or halve the bill."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from understudy.planning.search import Premise
from understudy.timing.find_architecture import find_architecture
from understudy.timing.weight_types import weight_type

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from understudy.planning.replays import Fleet, Order, Replays
    from understudy.planning.search import Finder
    from understudy.planning.shape import Shape

_NAMES = {"ttft_ms": "TTFT limit", "itl_ms": "TPOT limit", "e2e_ms": "E2E limit"}
MUCH = 1.25
"""A bill that changes by this factor is worth a line of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A change of the question, and the cheapest fleet that then meets the goal."""

    change: str
    cost: float | None
    """$ per hour; None if no fleet of the tried shapes meets the goal within the most GPUs."""
    fleet: str = ""
    gpus: int = 0

    def ratio(self, cost: float) -> float:
        """Return the new bill divided by the old one; infinite if no fleet meets the goal."""
        return math.inf if self.cost is None else self.cost / cost


def list_changes(finder: Finder) -> list[tuple[str, Premise]]:
    """List the changes that are tried: users, each objective, and the type of the weights."""
    question = finder.question
    changes = [
        ("twice the users", Premise(users=2.0)),
        ("half the users", Premise(users=0.5)),
    ]
    for name, title in _NAMES.items():
        limit = getattr(question.slo, name)
        if limit is None:
            continue
        for factor in (0.5, 2.0):
            slo = replace(question.slo, **{name: limit * factor})
            changes.append((f"{title} {limit * factor:g} ms instead of {limit:g}", Premise(slo=slo)))
    own = weight_type(find_architecture(question.model).weights).name
    if own == "bf16":
        changes.append(("weights in fp8 instead of bf16", Premise(weights="fp8")))
    return changes


def list_shapes(shapes: Sequence[Shape], premise: Premise) -> list[Shape]:
    """Return the shapes under a premise: smaller weights also fit on engines of fewer GPUs."""
    if premise.weights is None:
        return list(shapes)
    halves = [replace(shape, tensor=shape.tensor >> power) for shape in shapes for power in range(4)]
    return list(dict.fromkeys(shape for shape in halves if shape.tensor))


def try_changes(finder: Finder, replays: Replays, best: Fleet, shapes: Sequence[Shape]) -> list[Lever]:
    """Return the cheapest fleet of `shapes` under every change."""
    changes = list_changes(finder)
    found: dict[int, Fleet | None] = dict.fromkeys(range(len(changes)))

    def cost_of(place: int) -> float:
        fleet = found[place]
        return math.inf if fleet is None else fleet.cost

    def search_all(place: int, premise: Premise) -> Generator[Order, Fleet, None]:
        for shape in list_shapes(shapes, premise):
            start = max(1, round(best.cost * premise.users / finder.engine_cost(shape)))
            cheaper = yield from finder.search(shape, lambda: cost_of(place), start, premise=premise)
            found[place] = cheaper or found[place]

    replays.run(
        [search_all(place, premise) for place, (_, premise) in enumerate(changes)], "what changes the bill"
    )
    levers = []
    for place, (change, premise) in enumerate(changes):
        fleet = found[place]
        if fleet is None and premise in finder.refused:
            continue
        if fleet is None:
            levers.append(Lever(change=change, cost=None))
        else:
            described = fleet.shape.describe(fleet.size)
            levers.append(Lever(change=change, cost=fleet.cost, fleet=described, gpus=fleet.gpus))
    return levers
