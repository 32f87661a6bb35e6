"""Searches find the answer of the full grid."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.report import Slo
from understudy.run.settings import ReplaySettings
from understudy.sweep.answer import find_answers, share_variance
from understudy.sweep.candidate import Candidate, Outcome, Summary, Tail
from understudy.sweep.local import InProcess
from understudy.sweep.model_search import search_with_optuna
from understudy.sweep.search import (
    find_monotone,
    search_by_bisection,
    search_by_halving,
    search_grid,
    search_random,
)
from understudy.sweep.space import Point, Space
from understudy.sweep.store import Store
from understudy.sweep.trials import Trials
from understudy.workload import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from understudy.sweep.local import Task

WORKLOAD = read_trace(Path(__file__).parents[2] / "examples" / "demo_trace.jsonl").head(200)
SPACE = Space.parse(
    ["workers=1..25", "max-num-seqs=2,4,8,16,32", "routing=round_robin,kv", "max-num-batched-tokens=512,8192"]
)
GOALS = (0.5, 0.9, 0.95, 0.98, 0.99, 0.995)


def build(space: Space, scale: float, point: Point) -> Candidate:
    values = space.values(point)
    engine = {name.replace("-", "_"): values[name] for name in values if name.startswith("max-num")}
    flags: dict[str, Any] = {name: values[name] for name in ("workers", "routing") if name in values}
    load = {"kind": "open_loop", "arrival_rate_scale": scale}
    settings = ReplaySettings.read(None, {**flags, "engine": engine, "load": load}, [])
    return Candidate(flags=values, settings=settings, slo=Slo(ttft_ms=150, itl_ms=12))


def make_trials(store: Store, scale: float = 12.0) -> Trials:
    return Trials(
        SPACE,
        partial(build, SPACE, scale),
        lambda candidate: candidate.gpus,
        WORKLOAD,
        InProcess(WORKLOAD),
        store,
    )


@pytest.fixture(scope="module")
def grid() -> tuple[Store, Trials]:
    """Store with the outcomes of all 500 combinations."""
    store = Store(None)
    trials = make_trials(store)
    search_grid(trials)
    assert len(trials.whole) == SPACE.size == 500
    return store, trials


def answer_of(trials: Trials, goal: float) -> tuple[float | None, float | None]:
    """Return cost and share of the answer."""
    (answer,) = find_answers(trials.whole.values(), goal)
    return (None, None) if answer.best is None else (answer.best.cost, answer.best.good)


@pytest.mark.parametrize("goal", GOALS)
def test_bisection_finds_the_answer_of_the_grid(grid: tuple[Store, Trials], goal: float) -> None:
    store, whole = grid
    trials = make_trials(store)
    search_by_bisection(trials, goal)
    assert answer_of(trials, goal) == answer_of(whole, goal)
    assert len(trials.whole) < 300


@pytest.mark.parametrize("goal", GOALS)
def test_halving_finds_the_answer_of_the_grid(grid: tuple[Store, Trials], goal: float) -> None:
    store, whole = grid
    trials = make_trials(store)
    search_by_halving(trials, goal)
    assert answer_of(trials, goal) == answer_of(whole, goal)
    assert 0 < len(trials.whole) < 350
    assert all(trial.summary.requests == len(WORKLOAD) for trial in trials.whole.values())


def test_the_goals_divide_the_grid(grid: tuple[Store, Trials]) -> None:
    """The comparison means something: answers differ by goal, and lie inside the space."""
    costs = [answer_of(grid[1], goal)[0] for goal in GOALS]
    assert len(set(costs)) >= 2
    assert 1 not in costs


def test_random_draws_as_many_as_named_and_none_twice(grid: tuple[Store, Trials]) -> None:
    trials = make_trials(grid[0])
    search_random(trials, 60)
    assert len(trials.whole) == 60
    again = make_trials(grid[0])
    search_random(again, 60)
    assert set(trials.whole) == set(again.whole)
    everything = make_trials(grid[0])
    search_random(everything, 10_000)
    assert len(everything.whole) == 500


def test_optuna_finds_the_answer_of_the_grid(grid: tuple[Store, Trials]) -> None:
    pytest.importorskip("optuna")
    trials = make_trials(grid[0])
    search_with_optuna(trials, 120, 0.95, 2)
    assert len(trials.whole) == 120
    assert answer_of(trials, 0.95)[0] == answer_of(grid[1], 0.95)[0]


def test_the_shares_of_variance_are_those_of_the_means(grid: tuple[Store, Trials]) -> None:
    trials = list(grid[1].whole.values())
    shares = share_variance(SPACE, trials)
    assert sum(shares.values()) <= 1 + 1e-9  # a full grid: effects of single flags are orthogonal
    mean = sum(trial.good for trial in trials) / len(trials)
    total = sum((trial.good - mean) ** 2 for trial in trials)
    by_workers: dict[int, list[float]] = {}
    for trial in trials:
        by_workers.setdefault(trial.point[0], []).append(trial.good)
    between = sum(len(some) * (sum(some) / len(some) - mean) ** 2 for some in by_workers.values())
    assert math.isclose(shares["workers"], between / total)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


class Scripted:
    """Runner whose share of good requests is a function of the candidate."""

    def __init__(self, good: Callable[[Candidate], float]) -> None:
        self.good = good

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        tail = Tail(None, None, None)
        for candidate, key in tasks:
            summary = Summary(
                requests=200,
                good=self.good(candidate),
                within={},
                goodput_per_s=None,
                ttft_ms=tail,
                itl_ms=tail,
                e2e_ms=tail,
                output_tokens_per_s=None,
                prefix_hit_ratio=None,
                rejected=0,
                preemptions=0,
                duration_s=1,
                digest="",
            )
            yield Outcome(key=key, flags={}, summary=summary)

    def close(self) -> None: ...


def bisect(good: Callable[[int], float], last: int = 64) -> Trials:
    space = Space.parse([f"workers=1..{last}"])
    trials = script(space, lambda candidate: good(candidate.settings.workers))
    search_by_bisection(trials, 0.99)
    return trials


def script(space: Space, good: Callable[[Candidate], float]) -> Trials:
    return Trials(
        space, partial(build, space, 1.0), lambda each: each.gpus, WORKLOAD, Scripted(good), Store(None)
    )


@pytest.mark.parametrize("first", [1, 2, 3, 17, 32, 63, 64, 65])
def test_bisection_replays_the_neighbours_of_the_boundary(first: int) -> None:
    trials = bisect(lambda workers: float(workers >= first))
    assert answer_of(trials, 0.99)[0] == (first if first <= 64 else None)
    assert len(trials.whole) <= 10
    replayed = {trial.flags["workers"] for trial in trials.whole.values()}
    assert {each for each in range(first - 2, first + 2) if 1 <= each <= 64} <= replayed


def test_a_boundary_that_is_not_monotone_replays_its_whole_line() -> None:
    trials = bisect(lambda workers: float(workers >= 17 and workers != 18))
    assert len(trials.whole) == 64
    assert answer_of(trials, 0.99)[0] == 17


def test_halving_replays_fleets_that_only_the_start_of_the_trace_overloads() -> None:
    space = Space.parse(["workers=1..25", "max-num-seqs=2,4,8,16"])

    def good(candidate: Candidate) -> float:
        workers, slots = candidate.settings.workers, candidate.flags["max-num-seqs"]
        if slots == 2:  # late on every part of the trace, in time on the whole
            return float(workers >= 7) if candidate.requests is None else 0.0
        return float(workers >= 10)

    trials = script(space, good)
    search_by_halving(trials, 0.99)
    (answer,) = find_answers(trials.whole.values(), 0.99)
    assert answer.best is not None
    assert answer.best.flags == {"workers": 7, "max-num-seqs": 2}
    assert len(trials.whole) < 70


@pytest.mark.parametrize("search", [search_by_bisection, search_by_halving])
def test_the_next_smaller_fleet_is_that_of_the_grid(search: Callable[[Trials, float], None]) -> None:
    space = Space.parse(["workers=1..25", "max-num-seqs=2,4,8,16"])

    def good(candidate: Candidate) -> float:
        workers, slots = candidate.settings.workers, candidate.flags["max-num-seqs"]
        return {2: 0.5 + (workers >= 20) / 2, 4: 0.4 + (workers >= 9) * 0.6}.get(slots, 0.98 * (workers >= 8))

    whole, found = script(space, good), script(space, good)
    search_grid(whole)
    search(found, 0.99)
    (expected,), (answer,) = (find_answers(each.whole.values(), 0.99) for each in (whole, found))
    assert expected.smaller is not None
    assert answer.smaller is not None
    assert answer.smaller.point == expected.smaller.point
    assert answer.smaller.good == 0.98


def test_only_monotone_flags_with_values_enough_are_bisected() -> None:
    assert find_monotone(Space.parse(["routing=kv,random", "workers=1..4"])) == 1
    assert find_monotone(Space.parse(["num-gpu-blocks=1..9", "workers=1..4"])) == 0
    assert find_monotone(Space.parse(["workers=1..3"])) is None
    with pytest.raises(ConfigError, match="no flag to bisect; vary workers or num-gpu-blocks"):
        bisect(float, last=3)
