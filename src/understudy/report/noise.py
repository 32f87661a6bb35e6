"""The noise of a difference between two runs of one workload: a paired bootstrap over groups of sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.run.bootstrap import FEWEST_GROUPS, bound, draw_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.report.groups import Groups

    Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measure:
    """A ratio of two sums by which runs are compared."""

    key: str
    """Group and name of the value in a report."""
    words: str
    more_is_better: bool
    sums: str
    """Column of `Groups` above the line."""
    counts: str
    """Column below the line."""

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of requests, not times."""
        return self.more_is_better


COMPLETED = Measure("requests.completed", "completed requests", True, "completed", "requests")
ATTAINMENT = Measure("goodput.ratio", "SLO attainment", True, "good", "requests")
TTFT = Measure("ttft_ms.mean", "mean TTFT", False, "ttft_ms", "with_token")
E2E = Measure("e2e_ms.mean", "mean E2E", False, "e2e_ms", "completed")
ITL = Measure("itl_ms.mean", "mean ITL", False, "gaps_ms", "gaps")
MEASURES = (COMPLETED, ATTAINMENT, TTFT, E2E, ITL)
"""In the order in which they decide."""


def estimate_interval(
    one: Groups | None, other: Groups | None, measure: Measure, comparisons: int = 1
) -> tuple[float, float] | None:
    """Return the confidence interval of `other` minus `one`; None if the groups say too little.

    `comparisons` made for one answer share the 5 % in which it may be wrong.
    """
    if one is None or other is None or one.requests != other.requests or len(one.requests) < FEWEST_GROUPS:
        return None
    parts = [_read(groups, measure) for groups in (one, other)]
    if any(part is None for part in parts):
        return None
    counts = draw_groups(len(one.requests))
    values = []
    points = []
    for part in parts:
        assert part is not None
        above, below = part
        if not below.sum():
            return None
        drawn = counts @ below
        values.append(counts @ above / np.where(drawn > 0, drawn, np.nan))
        points.append(float(above.sum() / below.sum()))
    return bound(values[1] - values[0], points[1] - points[0], len(one.requests), comparisons)


def is_above_noise(one: Groups, other: Groups, measure: Measure) -> bool:
    """Whether two runs differ by more than the noise; True if the groups say too little about it."""
    interval = estimate_interval(one, other, measure)
    return interval is None or not interval[0] <= 0 <= interval[1]


def estimate_share(groups: Groups, measure: Measure) -> tuple[float, float] | None:
    """Return the confidence interval of one run's share of requests; None if the groups say too little."""
    part = _read(groups, measure)
    if part is None or len(groups.requests) < FEWEST_GROUPS or not part[1].sum():
        return None
    above, below = part
    counts = draw_groups(len(groups.requests))
    low, high = bound(
        counts @ above / (counts @ below), float(above.sum() / below.sum()), len(groups.requests), 1
    )
    return max(low, 0.0), min(high, 1.0)


def _read(groups: Groups, measure: Measure) -> tuple[Vector, Vector] | None:
    above, below = getattr(groups, measure.sums), getattr(groups, measure.counts)
    return None if above is None else (np.array(above, np.float64), np.array(below, np.float64))
