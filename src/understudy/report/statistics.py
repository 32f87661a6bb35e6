"""Compute exact statistics of values, optionally weighted by counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from understudy.workload.columns import Int64Column

Float64Column = NDArray[np.float64]

PERCENTILES = (50, 75, 90, 95, 99)
PERCENTILE_METHOD = (
    "nearest rank: p of n values is the ceil(p / 100 * n)-th smallest; exact, no interpolation"
)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of `count` values: exact percentiles (nearest rank), population standard deviation.

    Without values every statistic is NaN.
    """

    count: int
    mean: float = math.nan
    min: float = math.nan
    max: float = math.nan
    p50: float = math.nan
    p75: float = math.nan
    p90: float = math.nan
    p95: float = math.nan
    p99: float = math.nan
    std: float = math.nan

    @classmethod
    def of(cls, values: Float64Column, counts: Int64Column | None = None) -> Statistics:
        """Summarise `values`; with `counts` they must ascend and value i occurs counts[i] ≥ 1 times."""
        if not len(values):
            return cls(0)
        if counts is None:
            values = np.sort(values)
            count = len(values)
            ranked = values[[nearest_rank(p, count) for p in PERCENTILES]]
        else:
            cumulative = np.cumsum(counts)
            count = int(cumulative[-1])
            ranks = [nearest_rank(p, count) for p in PERCENTILES]
            ranked = values[np.searchsorted(cumulative, ranks, side="right")]
        # Sum differences from the minimum, so that equal values have an exact mean and no deviation.
        low = float(values[0])
        above = values - low
        mean = float((above if counts is None else above * counts).sum()) / count
        above -= mean
        above *= above
        variance = float((above if counts is None else above * counts).sum()) / count
        p50, p75, p90, p95, p99 = ranked.tolist()
        return cls(
            count=count,
            mean=low + mean,
            min=low,
            max=float(values[-1]),
            p50=p50,
            p75=p75,
            p90=p90,
            p95=p95,
            p99=p99,
            std=math.sqrt(variance),
        )


def nearest_rank(part: int, count: int, whole: int = 100) -> int:
    """Return the index, from 0, of the value at part/whole among `count` ascending values."""
    return max(-(-part * count // whole), 1) - 1
