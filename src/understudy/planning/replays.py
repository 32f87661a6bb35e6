"""Replays of a plan: each fleet once, hopeless ones on a part of the log, several searches at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from understudy.planning.shape import Shape, Size
    from understudy.sweep.candidate import Candidate, Outcome, Summary
    from understudy.sweep.local import Runner
    from understudy.sweep.store import Store

    Progress = Callable[[str, int, int], None]
    """Called with the task, and the numbers of ended and of all searches."""

PART = 4
"""A fleet is replayed on 1 / PART of the log first, if that has enough requests."""
LEAST_PART = 200
"""Fewest requests of that part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A fleet and, if it was replayed, its results on the whole log."""

    shape: Shape
    size: Size
    candidate: Candidate
    cost: float
    """$ per hour."""
    summary: Summary | None = None
    problem: str | None = None
    """Why there is no result."""

    @property
    def judged(self) -> float:
        """Share of requests in time; 0 for a fleet that a part of the log has ruled out."""
        return 0.0 if self.summary is None else self.summary.judged

    @property
    def gpus(self) -> int:
        """GPUs of the fleet."""
        return self.candidate.gpus

    def meets(self, goal: float) -> bool:
        """Whether the fleet was replayed whole and meets the goal."""
        return self.summary is not None and self.summary.judged >= goal


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A fleet that a search wants replayed; `whole`: also if a part of the log has ruled it out."""

    fleet: Fleet
    whole: bool = False


class Replays:
    """Runs the orders of searches; equal candidates run once, and the store keeps all results."""

    def __init__(
        self,
        runner: Runner,
        store: Store,
        digest: str,
        requests: int,
        goal: float,
        jobs: int,
        progress: Progress | None = None,
    ) -> None:
        self.ran = 0
        """Replays that were run now."""
        self.found = 0
        """Replays whose results the store had from an earlier plan."""
        self.cpu_s = 0.0
        self.ruled_out = 0
        """Fleets that a part of the log has ruled out."""
        self.fleets: set[str] = set()
        """Keys of the fleets that searches asked for."""
        self._kept = set(store.outcomes)
        self.whole: list[Fleet] = []
        """Fleets that were replayed on the whole log, as often as a search asked for them."""
        self._runner, self._store, self._digest = runner, store, digest
        self._requests, self._goal, self._jobs, self._progress = requests, goal, jobs, progress

    def run(self, searches: Sequence[Generator[Order, Fleet, None]], doing: str) -> None:
        """Run searches side by side, as many as there are processes, each until it ends."""
        waiting = list(searches)[::-1]
        orders: dict[Generator[Order, Fleet, None], Order] = {}
        while waiting or orders:
            while waiting and len(orders) < self._jobs:
                search = waiting.pop()
                if (first := next(search, None)) is not None:
                    orders[search] = first
            results = self._replay(list(orders.values()))
            following: dict[Generator[Order, Fleet, None], Order] = {}
            for (search, _), result in zip(orders.items(), results, strict=True):
                try:
                    following[search] = search.send(result)
                except StopIteration:
                    continue
            orders = following
            if self._progress is not None:
                self._progress(doing, len(searches) - len(waiting) - len(orders), len(searches))

    def _replay(self, orders: Sequence[Order]) -> list[Fleet]:
        """Replay on a part where that may rule fleets out, then the others whole."""
        self.fleets.update(order.fleet.candidate.key(self._digest) for order in orders)
        part = self._requests // PART
        hopeless = set()
        if part >= LEAST_PART:
            tried = [
                place
                for place, order in enumerate(orders)
                if not order.whole
                and order.fleet.candidate.settings.users == 1
                and order.fleet.candidate.key(self._digest) not in self._store.outcomes
            ]
            outcomes = self._outcomes(
                [replace(orders[place].fleet.candidate, requests=part) for place in tried]
            )
            allowed = (1 - self._goal) * self._requests
            for place, outcome in zip(tried, outcomes, strict=True):
                late = (
                    0.0 if outcome.summary is None else (1 - outcome.summary.good) * outcome.summary.requests
                )
                if late > allowed + 0.5:
                    hopeless.add(place)
        self.ruled_out += len(hopeless)
        whole = [place for place in range(len(orders)) if place not in hopeless]
        outcomes = self._outcomes([orders[place].fleet.candidate for place in whole])
        fleets = [order.fleet for order in orders]
        for place, outcome in zip(whole, outcomes, strict=True):
            fleets[place] = replace(fleets[place], summary=outcome.summary, problem=outcome.error)
            self.whole.append(fleets[place])
        return fleets

    def _outcomes(self, candidates: Sequence[Candidate]) -> list[Outcome]:
        keys = [candidate.key(self._digest) for candidate in candidates]
        tasks = {key: (one, key) for key, one in zip(keys, candidates, strict=True)}
        pending = [task for key, task in tasks.items() if key not in self._store.outcomes]
        again = self._kept & tasks.keys()
        self.found += len(again)
        self._kept -= again
        for outcome in self._runner.run(pending):
            if outcome.lost:
                self._store.outcomes[outcome.key] = outcome
            else:
                self._store.add(outcome)
            self.ran += 1
            self.cpu_s += outcome.cpu_s
        return [self._store.outcomes[key] for key in keys]
