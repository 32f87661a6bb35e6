"""Searches: which combinations of a space are replayed, so that the cheapest fleet that meets the goal is found."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import groupby
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.sweep.answer import LOAD_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.sweep.candidate import Summary
    from understudy.sweep.space import Point, Space
    from understudy.sweep.trials import Trials

MAX_GRID = 2000
"""Most combinations that are all replayed unless another search is chosen."""
MONOTONE = ("workers", "num-gpu-blocks", "max-total-tokens")
"""Flags of which more is usually better and never cheaper."""
KEPT = 3
"""Successive halving keeps one candidate of so many, and replays so many times the requests."""
MIN_REQUESTS = 50


def search_grid(trials: Trials) -> None:
    """Replay every valid combination."""
    trials.run(trials.keep_valid(trials.space.points()))


def search_random(trials: Trials, count: int, seed: int = 0) -> None:
    """Replay `count` valid combinations, drawn without replacement; fewer if there are no more."""
    space, drawn = trials.space, random.Random(seed)
    if space.size <= MAX_GRID * 50:
        order: Iterable[Point] = drawn.sample(list(space.points()), space.size)
    else:
        order = _draw_points(space, drawn, 100 * count)
    points: list[Point] = []
    for point in order:
        if len(points) == count:
            break
        if trials.candidate(point) is not None:
            points.append(point)
    trials.run(points)


def _draw_points(space: Space, drawn: random.Random, count: int) -> Iterable[Point]:
    found = (tuple(drawn.randrange(len(each.texts)) for each in space.dimensions) for _ in range(count))
    return dict.fromkeys(found)


def find_monotone(space: Space) -> int | None:
    """Return the place of the flag to bisect: that of `MONOTONE` with the most values, at least 4; None without."""
    places = [
        (len(each.texts), -place)
        for place, each in enumerate(space.dimensions)
        if each.flag in MONOTONE and len(each.texts) >= 4
    ]
    return -max(places)[1] if places else None


def search_by_bisection(trials: Trials, goal: float) -> None:
    """Find the smallest value of a monotone flag that meets the goal, for every combination of the others.

    Two values on each side of the boundary are replayed. If they contradict monotony, so is the whole line. At the end,
    all combinations that cost as much as the answer or the next less are replayed.
    """
    place = find_monotone(trials.space)
    if place is None:
        raise ConfigError(
            f"--search bisect: no flag to bisect; vary {' or '.join(MONOTONE)} with at least 4 values"
        )
    values = trials.space.dimensions[place].values
    lines: dict[Point, list[Point]] = defaultdict(list)
    for point in trials.keep_valid(trials.space.points()):
        lines[point[:place] + point[place + 1 :]].append(point)
    for line in lines.values():
        line.sort(key=lambda point: _order(values[point[place]]))
    trials.expect(sum(min(len(line), math.ceil(math.log2(len(line))) + 3) for line in lines.values()))
    # `low` fails and `high` meets the goal, or lies outside of the line.
    bounds = {key: (-1, len(line)) for key, line in lines.items()}
    while pending := {key: sum(ends) // 2 for key, ends in bounds.items() if ends[1] - ends[0] > 1}:
        found = trials.run(lines[key][at] for key, at in pending.items())
        for key, at in pending.items():
            low, high = bounds[key]
            bounds[key] = (low, at) if _meets(found, lines[key][at], goal) else (at, high)
    near = {
        key: [at for at in range(high - 2, high + 2) if 0 <= at < len(lines[key])]
        for key, (_, high) in bounds.items()
    }
    found = trials.run(lines[key][at] for key, some in near.items() for at in some)
    for key, (_, high) in bounds.items():
        is_monotone = all(_meets(found, lines[key][at], goal) == (at >= high) for at in near[key])
        if not is_monotone:
            trials.run(lines[key])
    if trials.space.dimensions[place].flag == "workers":  # others leave the cost as it is
        _replay_levels(trials, [point for line in lines.values() for point in line], goal, 2 * len(lines))


def _order(value: object) -> tuple[bool, float]:
    """Order the values of a monotone flag; one that leaves the flag out comes first."""
    return (True, float(value)) if isinstance(value, int | float) else (False, 0.0)


def _meets(found: dict[Point, Summary], point: Point, goal: float) -> bool:
    return point in found and found[point].judged >= goal


def search_by_halving(trials: Trials, goal: float) -> None:
    """Replay all candidates on a part of the workload, and ever fewer on more of it; the last on all of it.

    Kept are the fronts of cost against requests in time, of every load, until a third is reached. At the end, dropped
    candidates are replayed whole too if they are cheaper than the answer and met the goal on their part, or if they
    cost as much as the answer or the next less; of the latter at most a third of all, the best on their part first.
    """
    points = everything = trials.keep_valid(trials.space.points())
    sizes = _list_parts(trials.requests, len(points))
    trials.expect(sum(max(1, math.ceil(len(points) / KEPT**rung)) for rung in range(len(sizes) + 1)))
    dropped: dict[Point, float] = {}
    for size in sizes:
        found = trials.run(points, size)
        kept = _keep_best(trials, found, math.ceil(len(points) / KEPT))
        dropped |= {point: summary.judged for point, summary in found.items() if point not in kept}
        points = [point for point in points if point in kept]
    trials.run(points)
    answers: dict[object, float] = defaultdict(lambda: math.inf)
    for trial in trials.whole.values():
        if trial.judged >= goal:
            load = _load_of(trials.space, trial.point)
            answers[load] = min(answers[load], trial.cost)
    trials.run(
        point
        for point, good in dropped.items()
        if good >= goal and trials.cost(point) < answers[_load_of(trials.space, point)]
    )
    best_first = sorted(everything, key=lambda point: -dropped.get(point, 0.0))
    _replay_levels(trials, best_first, goal, math.ceil(len(everything) / KEPT))


def _replay_levels(trials: Trials, points: Sequence[Point], goal: float, limit: int) -> None:
    """Replay candidates that cost as much as the answer or the next less, until no cheaper one meets the goal.

    Without an answer, those of the highest cost. At most `limit` candidates for each load, in the order of `points`.
    """
    by_load: dict[Point, list[Point]] = defaultdict(list)
    for point in points:
        by_load[_load_of(trials.space, point)].append(point)
    for some in by_load.values():
        costs = sorted({trials.cost(point) for point in some})
        left = limit
        while True:
            meeting = [
                trial.cost for point in some if (trial := trials.whole.get(point)) and trial.judged >= goal
            ]
            at = costs.index(min(meeting)) if meeting else len(costs) - 1
            levels = costs[max(0, at - 1) : at + 1] if meeting else costs[at:]
            pending = [
                point
                for point in some
                if point not in trials.whole and point not in trials.failed and trials.cost(point) in levels
            ][:left]
            if not pending:
                break
            trials.run(pending)
            left -= len(pending)


def _list_parts(requests: int, candidates: int) -> list[int]:
    """Return the numbers of requests of the rungs before the whole workload, ascending."""
    sizes: list[int] = []
    while requests // KEPT >= MIN_REQUESTS and KEPT ** (len(sizes) + 1) < candidates:
        requests //= KEPT
        sizes.append(requests)
    return sizes[::-1]


def _keep_best(trials: Trials, found: dict[Point, Summary], count: int) -> set[Point]:
    """Return the points of the first fronts of every load, whole fronts, until at least `count` are kept."""

    def load_of(point: Point) -> Point:
        return _load_of(trials.space, point)

    kept: set[Point] = set()
    remaining = {
        load: sorted(points, key=lambda point: (trials.cost(point), -found[point].judged))
        for load, points in groupby(sorted(found, key=load_of), load_of)
    }
    while len(kept) < count and any(remaining.values()):
        for load, points in remaining.items():
            front = _take_front(points, trials, found)
            kept |= set(front)
            remaining[load] = [point for point in points if point not in kept]
    return kept


def _take_front(points: Sequence[Point], trials: Trials, found: dict[Point, Summary]) -> list[Point]:
    """Return the points that no other surpasses, from points in the order of cost and falling share."""
    front: list[Point] = []
    best, cost = -1.0, -1.0
    for point in points:
        good = found[point].judged
        if good > best or (
            good == best and trials.cost(point) == cost
        ):  # equal points do not surpass each other
            front.append(point)
            best, cost = good, trials.cost(point)
    return front


def _load_of(space: Space, point: Point) -> Point:
    """Return the part of a combination that sets the load."""
    return tuple(at for each, at in zip(space.dimensions, point, strict=True) if each.flag in LOAD_FLAGS)
