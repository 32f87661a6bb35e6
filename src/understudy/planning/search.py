"""Branch and bound over shapes: the fewest engines of each that cost less than the best fleet so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.planning.replays import Fleet, Order
from understudy.planning.scaled_times import scale_times
from understudy.planning.space import list_sizes_of
from understudy.sweep.prices import Prices

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from understudy.planning.question import Question
    from understudy.planning.shape import Shape, Size
    from understudy.report.goodput import Slo

    Search = Generator[Order, Fleet, Fleet | None]

MOST_DIVISIONS = 5
"""Divisions of so many engines into prefill and decode workers that are tried, those nearest to the estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Premise:
    """Differences from the question: users, objectives, weights, or the times of steps."""

    users: float = 1.0
    slo: Slo | None = None
    weights: str | None = None
    time_factor: float = 1.0


AS_ASKED = Premise()


@dataclass(kw_only=True, slots=True)
class Finder:
    """Finds the fewest engines of a shape that meet the goal, and remembers what was too few."""

    question: Question
    prefill_share: float = 0.5
    """Estimated share of the engines' work that prefill is."""
    too_few: dict[tuple[Shape, Premise], int] = field(default_factory=dict)
    """Most engines of a shape that are known to miss the goal."""
    rejected: dict[Shape, str] = field(default_factory=dict)
    """Shapes that no fleet can have, and why."""
    refused: set[Premise] = field(default_factory=set)
    """Premises under which a shape cannot be built, such as weights that its model does not have."""

    def build(self, shape: Shape, size: Size, premise: Premise = AS_ASKED) -> Fleet:
        """Return a fleet. ConfigError names what the engine or the GPU refuses."""
        candidate = shape.build(
            self.question, size, users=premise.users, slo=premise.slo, weights=premise.weights
        )
        candidate = scale_times(candidate, premise.time_factor)
        prices = Prices(self.question.prices.by_name)
        return Fleet(shape=shape, size=size, candidate=candidate, cost=prices.cost(candidate))

    def engine_cost(self, shape: Shape) -> float:
        """Return the price of one engine per hour."""
        return shape.engine_gpus * self.question.prices.by_name[shape.gpu]

    def search(
        self,
        shape: Shape,
        limit: Callable[[], float],
        start: int,
        *,
        premise: Premise = AS_ASKED,
        stop: Callable[[], bool] = lambda: False,
    ) -> Search:
        """Find the cheapest fleet of a shape that meets the goal and costs less than `limit`; None without one.

        `start` is a guess of the number of engines. More engines are taken to be no worse. Before each number `stop`
        is asked whether to end with what was found.
        """
        key = (shape, premise)
        least = 2 if shape.is_split else 1
        low, best = max(least - 1, self.too_few.get(key, 0)), None
        at = max(start, low + 1)
        while True:
            most = self._most_engines(shape, limit())
            high = most + 1 if best is None else min(best.size.total, most + 1)
            if high - low <= 1 or stop():
                break
            if best is not None:
                at = (low + high) // 2
            at = min(max(at, low + 1), high - 1)
            found = yield from self.try_engines(shape, at, premise)
            if found is None:
                return best
            if found.meets(self.question.goal):
                best = found
            else:
                low = at
                self.too_few[key] = max(at, self.too_few.get(key, 0))
                at = min(2 * at, most)
        return best if best is not None and best.cost < limit() else None

    def try_engines(
        self, shape: Shape, engines: int, premise: Premise
    ) -> Generator[Order, Fleet, Fleet | None]:
        """Replay the fleets of so many engines until one meets the goal; return it, or the best of them."""
        best: Fleet | None = None
        for size in self._list_sizes(shape, engines):
            try:
                fleet = self.build(shape, size, premise)
            except ConfigError as error:
                self._refuse(shape, premise, str(error))
                return None
            result = yield Order(fleet=fleet)
            if result.problem is not None:
                self._refuse(shape, premise, result.problem)
                return None
            if best is None or result.judged > best.judged:
                best = result
            if result.meets(self.question.goal):
                break
        return best

    def _refuse(self, shape: Shape, premise: Premise, problem: str) -> None:
        if premise == AS_ASKED:
            self.rejected.setdefault(shape, problem)
        else:
            self.refused.add(premise)

    def _list_sizes(self, shape: Shape, engines: int) -> list[Size]:
        sizes = list_sizes_of(shape, engines)
        wanted = self.prefill_share * engines
        return sorted(sizes, key=lambda size: abs(size.prefill - wanted))[:MOST_DIVISIONS]

    def _most_engines(self, shape: Shape, limit: float) -> int:
        most = self.question.most_gpus // shape.engine_gpus
        if math.isinf(limit):
            return most
        below = (
            math.ceil(limit / self.engine_cost(shape) - 1e-9) - 1
        )  # costs less than the limit, not as much
        return min(most, below)
