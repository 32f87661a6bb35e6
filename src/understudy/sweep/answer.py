"""The answer of a sweep: the cheapest fleet that meets the goal, the front, and the flags that mattered."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.sweep.space import Space, Value
    from understudy.sweep.trials import Trial

FRONT_LINES = 12
LOAD_FLAGS = ("users", "arrival-rate-scale", "concurrency", "max-tokens")
"""Flags that change the load; each of its values has an answer of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The cheapest fleet that meets the goal under one load, and the fleets near it."""

    load: dict[str, Value]
    """Varied flags that set the load; empty if the load is the same everywhere."""
    best: Trial | None
    """Cheapest fleet that meets the goal; None if none does."""
    smaller: Trial | None
    """Best fleet of the next lower cost; without an answer, the nearest miss."""
    front: tuple[Trial, ...]
    """Fleets that no cheaper or equally cheap fleet surpasses, by cost."""
    is_front_shortened: bool


def describe_load(load: dict[str, Value]) -> str:
    """Return the varied flags of a load as one line, with the meaning of those that two could confuse."""
    words = []
    for name, value in load.items():
        meaning = ""
        if name == "users":
            meaning = (
                " (those of the trace)" if value in (None, 1) else f" ({value} times the users, each as fast)"
            )
        elif name == "arrival-rate-scale" and value not in (None, 1):
            meaning = f" (the same users, {value} times as fast; for growth vary users)"
        words.append(f"{name}={'none' if value is None else value}{meaning}")
    return " ".join(words)


def find_answers(trials: Iterable[Trial], goal: float) -> list[Answer]:
    """Return the answer of every load, in the order of the trials."""
    by_load: dict[tuple[tuple[str, Value], ...], list[Trial]] = defaultdict(list)
    for trial in trials:
        load = tuple((name, trial.flags[name]) for name in LOAD_FLAGS if name in trial.flags)
        by_load[load].append(trial)
    return [_find_answer(dict(load), some, goal) for load, some in by_load.items()]


def _find_answer(load: dict[str, Value], trials: Sequence[Trial], goal: float) -> Answer:
    meeting = [trial for trial in trials if trial.judged >= goal]
    best = min(meeting, key=_rank, default=None)
    if best is None:
        smaller = min(
            trials,
            key=lambda trial: (-trial.judged, trial.cost, trial.candidate.host_bytes, trial.point),
            default=None,
        )
    else:
        cheaper = [trial for trial in trials if trial.cost < best.cost]
        next_cost = max((trial.cost for trial in cheaper), default=0.0)
        smaller = min((trial for trial in cheaper if trial.cost == next_cost), key=_rank, default=None)
    whole = find_front(trials)
    front = _shorten(whole, best)
    return Answer(
        load=load, best=best, smaller=smaller, front=tuple(front), is_front_shortened=len(front) < len(whole)
    )


def _rank(trial: Trial) -> tuple[float, float, float, tuple[int, ...]]:
    """Order trials by cost, then by the share of good requests, by host memory, and by their place in the grid."""
    return trial.cost, -trial.judged, trial.candidate.host_bytes, trial.point


def find_front(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that no other surpasses in cost and share of good requests, by ascending cost."""
    front: list[Trial] = []
    for trial in sorted(trials, key=_rank):
        if not front or trial.judged > front[-1].judged:
            front.append(trial)
    return front


def _shorten(front: list[Trial], best: Trial | None) -> list[Trial]:
    """Drop the points that add least, but neither the cheapest nor the answer, until the front fits its lines."""
    kept = list(front)
    while len(kept) > FRONT_LINES:
        gains = [
            (after.judged - before.judged, place) for place, (before, after) in enumerate(pairwise(kept), 1)
        ]
        _, place = min((gain, place) for gain, place in gains if kept[place] is not best)
        del kept[place]
    return kept


def share_variance(space: Space, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the share of the variance of good requests that each flag alone explains, largest first.

    It is the variance of the means by the flag's values, divided by the variance of all trials; what remains to 1 is
    due to combinations of flags. Empty if all trials are equally good.
    """
    good = np.array([trial.judged for trial in trials])
    if len(trials) < 2 or (total := float(good.var())) < 1e-12:
        return {}
    shares = {}
    for place, dimension in enumerate(space.dimensions):
        at = np.array([trial.point[place] for trial in trials])
        counts = np.bincount(at)
        means = np.bincount(at, good)[counts > 0] / counts[counts > 0]
        between = float(counts[counts > 0] @ (means - good.mean()) ** 2) / len(trials)
        shares[dimension.flag] = between / total
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
