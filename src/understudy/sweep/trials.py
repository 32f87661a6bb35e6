"""The candidates of a space: each is checked before it runs, runs once, and its outcome is stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.sweep.candidate import Candidate, Outcome, Summary
    from understudy.sweep.local import Runner
    from understudy.sweep.space import Point, Space, Value
    from understudy.sweep.store import Store
    from understudy.workload import Workload

    Progress = Callable[[int, int], None]
    """Called with the numbers of finished and of expected candidates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A candidate that was replayed on the whole workload."""

    point: Point
    flags: dict[str, Value]
    candidate: Candidate
    summary: Summary
    cost: float
    """Price per hour; without prices, the number of GPUs."""
    cpu_s: float

    @property
    def gpus(self) -> int:
        """GPUs of the fleet."""
        return self.candidate.gpus

    @property
    def good(self) -> float:
        """Share of requests within the objectives."""
        return self.summary.good

    @property
    def judged(self) -> float:
        """Share of requests within the objectives that the goal judges: with windows, in the worst of them."""
        return self.summary.judged


class Trials:
    """Runs candidates and remembers their outcomes; `build` makes a candidate or raises ConfigError."""

    def __init__(
        self,
        space: Space,
        build: Callable[[Point], Candidate],
        price: Callable[[Candidate], float],
        workload: Workload,
        runner: Runner,
        store: Store,
        progress: Progress | None = None,
    ) -> None:
        self.space = space
        self.requests = len(workload)
        self.invalid: dict[Point, str] = {}
        """Reasons of the combinations that were not run."""
        self.failed: dict[Point, str] = {}
        """Errors of the combinations that were run and have no result."""
        self.whole: dict[Point, Trial] = {}
        """Results on the whole workload."""
        self.found = 0
        """Outcomes found in the store."""
        self.ran = 0
        """Outcomes computed now, also those on a part of the workload."""
        self.cpu_s = 0.0
        """CPU time of the outcomes computed now."""
        self._build, self._price = build, price
        self._digest = workload.digest
        self._runner, self._store, self._progress = runner, store, progress
        self._candidates: dict[Point, Candidate] = {}
        self._expected = 0

    def expect(self, outcomes: int) -> None:
        """Set the number of outcomes that the search needs, for the progress bar."""
        self._expected = outcomes

    def keep_valid(self, points: Iterable[Point]) -> list[Point]:
        """Return the combinations whose settings are valid; remember why the others are not."""
        return [point for point in points if self.candidate(point) is not None]

    def candidate(self, point: Point) -> Candidate | None:
        """Return the candidate of a combination; None if its settings are invalid."""
        if point in self.invalid:
            return None
        if point not in self._candidates:
            try:
                self._candidates[point] = self._build(point)
            except ConfigError as error:
                self.invalid[point] = str(error)
                return None
        return self._candidates[point]

    def cost(self, point: Point) -> float:
        """Return the price of a valid combination per hour; without prices, its number of GPUs."""
        return self._price(self._candidates[point])

    def run(self, points: Iterable[Point], requests: int | None = None) -> dict[Point, Summary]:
        """Return the summaries of valid combinations, on the first `requests` only if given.

        Combinations that fail have none. Outcomes in the store are not computed again.
        """
        keys: dict[str, list[Point]] = {}
        tasks = []
        for point in dict.fromkeys(points):
            candidate = self._candidates[point]
            if requests is not None:
                candidate = replace(candidate, requests=requests)
            key = candidate.key(self._digest)
            if key not in keys and key not in self._store.outcomes:
                tasks.append((candidate, key))
            keys.setdefault(key, []).append(point)
        self.found += len(keys) - len(tasks)
        expected = max(self._expected, self.ran + len(tasks))
        for outcome in self._runner.run(tasks):
            if outcome.lost:
                self._store.outcomes[outcome.key] = outcome
            else:
                self._store.add(outcome)
            self.ran += 1
            self.cpu_s += outcome.cpu_s
            if self._progress is not None:
                self._progress(self.ran, expected)
        summaries: dict[Point, Summary] = {}
        for key, equal in keys.items():
            outcome = self._store.outcomes[key]
            for point in equal:
                if outcome.summary is None:
                    self.failed[point] = outcome.error or "no result"
                else:
                    summaries[point] = outcome.summary
                    if requests is None:
                        self._keep(point, outcome, outcome.summary)
        return {point: summaries[point] for point in sorted(summaries)}

    def _keep(self, point: Point, outcome: Outcome, summary: Summary) -> None:
        flags: dict[str, Value] = self.space.values(point)
        self.whole[point] = Trial(
            point=point,
            flags=flags,
            candidate=self._candidates[point],
            summary=summary,
            cost=self.cost(point),
            cpu_s=outcome.cpu_s,
        )
