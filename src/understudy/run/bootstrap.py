"""A bootstrap over groups of sessions, from which the noise of a run's numbers follows."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

MOST_GROUPS = 64
FEWEST_GROUPS = 20
"""Fewer groups say too little about the noise."""
CONFIDENCE = 0.95
"""Confidence in a whole answer: all of its comparisons together are wrong in at most 5 % of cases."""
RESAMPLES = 4_000
_SEED = 20_240_229


def divide_sessions(sessions: NDArray[Any]) -> NDArray[np.int64]:
    """Return the group of each request: whole sessions, in the order of their first rows."""
    _, first, session = np.unique(sessions, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    order = rank[session]
    before = np.cumsum(np.bincount(order, minlength=len(first))) - 1  # rows up to the end of each session
    wanted = before * min(MOST_GROUPS, len(first)) // max(len(order), 1)
    dense: NDArray[np.int64] = np.unique(wanted, return_inverse=True)[1]
    return dense[order]


def estimate_mean(group: NDArray[np.int64], values: Vector) -> tuple[float, float] | None:
    """Return the confidence interval of the mean of `values`, each in its group; None for too few groups."""
    below = np.bincount(group).astype(np.float64)
    below = below[below > 0]
    if len(below) < FEWEST_GROUPS:
        return None
    above = np.bincount(np.unique(group, return_inverse=True)[1], values)
    counts = draw_groups(len(below))
    return bound(counts @ above / (counts @ below), float(values.mean()), len(below), 1)


@cache
def draw_groups(groups: int) -> Vector:
    """Return how often each group is drawn, by resample: always the same draws."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(groups, np.full(groups, 1 / groups), RESAMPLES).astype(np.float64)


def bound(values: Vector, point: float, groups: int, comparisons: int) -> tuple[float, float]:
    """Return the interval of resampled values around the point, wider for few groups as Student's t is."""
    tail = (1 - CONFIDENCE) / comparisons / 2
    low, high = np.nanquantile(values, [tail, 1 - tail])
    normal = NormalDist().inv_cdf(1 - tail)
    wider = (1 + (normal**2 + 1) / (4 * (groups - 1))) * (groups / (groups - 1)) ** 0.5
    return point - wider * (point - float(low)), point + wider * (float(high) - point)
