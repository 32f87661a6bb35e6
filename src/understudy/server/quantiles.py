"""Quantiles of latencies from counts by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

FINE_S = tuple(
    round(step * 10.0**power, 9) for power in range(-4, 2) for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
)
"""Ten bounds per decade, from 100 µs to 80 s: an interpolated quantile is accurate to about 10 %."""


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Interpolate the value that a share of the counted ones stays within; None without counts.

    `counts` has one more entry than `bounds`: values above the last bound count as that bound.
    """
    total = sum(counts)
    if total == 0:
        return None
    wanted, passed = share * total, 0
    for index, count in enumerate(counts[:-1]):
        if count and passed + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (wanted - passed) / count
        passed += count
    return bounds[-1]


def sum_counts(rows: Sequence[array[int]]) -> list[int]:
    """Add the counts of several histograms with equal bounds."""
    total: list[int] = (
        np.frombuffer(b"".join(rows), dtype=np.int64).reshape(len(rows), -1).sum(axis=0).tolist()
    )
    return total
