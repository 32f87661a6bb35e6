"""Find a plan: shapes, bounds, branch and bound, then the range, the runner-up and the levers of the answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.planning.bounds import bound_share, estimate_work
from understudy.planning.levers import try_changes
from understudy.planning.replays import Fleet, Order
from understudy.planning.result import Sure
from understudy.planning.scaled_times import find_time_range
from understudy.planning.search import AS_ASKED, Finder, Premise
from understudy.planning.shape import Size
from understudy.planning.space import (
    Reuse,
    check_shape,
    list_base_shapes,
    list_variants,
)
from understudy.text import plural

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from understudy.planning.levers import Lever
    from understudy.planning.question import Question
    from understudy.planning.replays import Replays
    from understudy.planning.shape import Shape
    from understudy.workload import Workload

RUNNER_UP_LIMIT = 3.0
"""A runner-up costs less than this many times the answer."""
_NEAREST_SHAPES = 4
"""Shapes of which the largest fleet is replayed if no fleet meets the goal."""


class Planner:
    """Finds the answer step by step; every step keeps what it found here."""

    def __init__(
        self, question: Question, workload: Workload, replays: Replays, most_cpu_s: float | None
    ) -> None:
        self.question, self.workload, self.replays = question, workload, replays
        self.most_cpu_s = most_cpu_s
        self.best: Fleet | None = None
        self.runner_up: Fleet | None = None
        self.nearest: Fleet | None = None
        self.sure: Sure | None = None
        self.levers: list[Lever] = []
        self.slow: dict[str, float] = {}
        self.notes: list[str] = []
        self.finder = Finder(question=question)
        self._starts: dict[Shape, int] = {}
        self._left_out: list[str] = []

    def run(self) -> None:
        """Find the answer, then what surrounds it. ConfigError names a setting that no shape can have."""
        reuse = Reuse.of(self.workload)
        base = self._list_possible(reuse)
        self._search(base, "comparing GPUs and parallel sizes")
        self._search(self._list_variants(base, reuse), "trying chunks, host memory and roles")
        if self.best is None:
            self._find_nearest(base)
        else:
            self._check_below()
            self._find_runner_up()
            self._find_range()
            self._find_levers()
        if self._left_out:
            listed = "; ".join(self._left_out)
            self.notes.append(
                f"not tried within {self.most_cpu_s:g} CPU s: {listed}; give more time with --most-cpu-s, and "
                "--store or --out to keep what is done"
            )

    @property
    def tried(self) -> int:
        """Shapes of which a fleet was replayed, or that a bound has ruled out."""
        return len(self._starts) + len(self.slow)

    def _list_possible(self, reuse: Reuse) -> list[Shape]:
        """Return the shapes that can be built and that a lone request does not rule out, the cheapest first."""
        shapes, notes = list_base_shapes(self.question, reuse)
        self.notes += notes
        costs: dict[Shape, float] = {}
        shares = []
        for shape in shapes:
            if (problem := check_shape(self.question, shape)) is not None:
                self.finder.rejected[shape] = problem
                continue
            candidate = shape.build(self.question, Size(engines=1))
            most = bound_share(self.workload, candidate)
            if most < self.question.goal:
                self.slow[shape.describe(Size(engines=1))] = most
                continue
            work = estimate_work(self.workload, candidate, reuse.share)
            shares.append(work.prefill_share)
            self._starts[shape] = max(1, math.ceil(work.engines))
            costs[shape] = work.engines * self.finder.engine_cost(shape)
        if not costs and not self.slow:
            reason = next(iter(self.finder.rejected.values()), "every engine is larger than --most-gpus")
            raise ConfigError(f"no fleet can be built; the first: {reason}")
        if shares:
            self.finder.prefill_share = sum(shares) / len(shares)
        return sorted(costs, key=lambda shape: costs[shape])

    def _list_variants(self, base: Iterable[Shape], reuse: Reuse) -> list[Shape]:
        hits = [
            fleet.summary.prefix_hit_ratio or 0.0
            for fleet in self.replays.whole
            if fleet.summary is not None and fleet.meets(self.question.goal)
        ]
        gain = reuse.share - min(hits, default=0.0)
        variants: list[Shape] = []
        for shape in base:
            if shape in self.finder.rejected:
                continue
            for variant in list_variants(self.question, shape, tier_gain=gain):
                if (problem := check_shape(self.question, variant)) is not None:
                    self.finder.rejected[variant] = problem
                    continue
                self._starts[variant] = max(self._starts[shape], 2 if variant.is_split else 1)
                variants.append(variant)
        return variants

    def _search(self, shapes: list[Shape], doing: str) -> None:
        """Search the shapes for a fleet that is cheaper than the best one."""

        def limit() -> float:
            return math.inf if self.best is None else self.best.cost

        def search(shape: Shape) -> Generator[Order, Fleet, None]:
            if self._must_stop():
                self._leave_out(shape.describe(Size(engines=1, prefill=int(shape.is_split))))
                return
            cut = False

            def stop() -> bool:
                nonlocal cut
                cut = cut or self._must_stop()
                return cut

            found = yield from self.finder.search(shape, limit, self._starts[shape], stop=stop)
            if cut:
                one = shape.describe(Size(engines=1, prefill=int(shape.is_split)))
                self._leave_out(f"other numbers of engines than those replayed of {one}")
            if found is not None and found.cost < limit():
                self.best = found

        self.replays.run([search(shape) for shape in shapes], doing)

    def _check_below(self) -> None:
        """Replay two engines less than the answer: with routing, more engines need not be better."""
        assert self.best is not None
        shape, engines = self.best.shape, self.best.size.total

        def search() -> Generator[Order, Fleet, None]:
            for size in range(max(1 + shape.is_split, engines - 2), engines - 1):
                found = yield from self.finder.try_engines(shape, size, AS_ASKED)
                if found is not None and found.meets(self.question.goal):
                    self.best = found
                    return

        self.replays.run([search()], "checking the answer")

    def _find_runner_up(self) -> None:
        """Find the cheapest fleet of another kind, up to `RUNNER_UP_LIMIT` times the cost of the answer."""
        assert self.best is not None
        best = self.best

        def limit() -> float:
            return RUNNER_UP_LIMIT * best.cost if self.runner_up is None else self.runner_up.cost

        def search(shape: Shape) -> Generator[Order, Fleet, None]:
            if self._must_stop():
                self._leave_out(
                    f"as a runner-up, {shape.describe(Size(engines=1, prefill=int(shape.is_split)))}"
                )
                return
            start = math.ceil(best.cost / self.finder.engine_cost(shape))
            found = yield from self.finder.search(shape, limit, start)
            if found is not None and found.cost < limit():
                self.runner_up = found

        others = [
            shape
            for shape in self._starts
            if shape.kind != best.shape.kind
            and shape not in self.finder.rejected
            and (shape.chunk_tokens, shape.host_gib) == (None, None)
        ]
        self.replays.run([search(shape) for shape in others], "finding the runner-up")

    def _find_range(self) -> None:
        """Replay the answer at the shortest and at the longest times, and find the fewest engines at both."""
        assert self.best is not None
        best = self.best
        found = find_time_range(best.candidate)
        if found is None:
            self.notes.append(
                "the range of the step times is not known: they are not those of a preset or a fit"
            )
            return
        fleets: dict[int, Fleet] = {}
        cheapest: dict[int, Fleet | None] = {}

        def search(place: int, factor: float) -> Generator[Order, Fleet, None]:
            premise = Premise(time_factor=factor)
            fleets[place] = yield Order(fleet=self.finder.build(best.shape, best.size, premise), whole=True)
            start = best.size.total
            cheapest[place] = yield from self.finder.search(
                best.shape, lambda: math.inf, start, premise=premise
            )

        self.replays.run(
            [search(place, factor) for place, factor in enumerate(found.factors)], "range of the times"
        )
        costs = [None if (fleet := cheapest[place]) is None else fleet.cost for place in (0, 1)]
        self.sure = Sure(
            range=found, shortest=fleets[0], longest=fleets[1], least_cost=costs[0], most_cost=costs[1]
        )

    def _find_levers(self) -> None:
        assert self.best is not None
        if self._must_stop():
            self._leave_out("what doubles or halves the bill")
            return
        shapes = [self.best.shape, *([] if self.runner_up is None else [self.runner_up.shape])]
        self.levers = try_changes(self.finder, self.replays, self.best, shapes)

    def _find_nearest(self, base: list[Shape]) -> None:
        """Replay the largest fleets whole, so that the nearest miss has numbers; one of them if time is spent."""

        def search(shape: Shape) -> Generator[Order, Fleet, None]:
            if self._is_spent() and any(fleet.summary is not None for fleet in self.replays.whole):
                return
            size = Size(engines=max(1, self.question.most_gpus // shape.engine_gpus))
            yield Order(fleet=self.finder.build(shape, size), whole=True)

        self.replays.run([search(shape) for shape in base[:_NEAREST_SHAPES]], "finding the nearest fleet")
        whole = [fleet for fleet in self.replays.whole if fleet.summary is not None]
        self.nearest = max(whole, key=lambda fleet: (fleet.judged, -fleet.cost), default=None)
        if not base:
            self.notes.append(
                f"no shape is left: {plural(len(self.slow), 'shape')} too slow even for a request alone, "
                f"{plural(len(self.finder.rejected), 'shape')} that cannot be built"
            )

    @property
    def stopped(self) -> bool:
        """Whether the CPU time was spent before everything was tried."""
        return bool(self._left_out)

    def _is_spent(self) -> bool:
        return self.most_cpu_s is not None and self.replays.cpu_s > self.most_cpu_s

    def _must_stop(self) -> bool:
        """Return whether the CPU time is spent; one fleet is tried in any case."""
        return self._is_spent() and bool(self.replays.fleets)

    def _leave_out(self, what: str) -> None:
        self._left_out.append(what)
