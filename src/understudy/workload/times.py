"""Milliseconds, as people and traces write them, to the int64 nanoseconds that everything else uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column


def milliseconds_to_ns(times_ms: NDArray[np.float64]) -> Int64Column:
    """Round each time once, half to even. Whole and fractional part apart, so that large times lose nothing.

    NaN becomes 0; times must lie below 2^63 ns.
    """
    times_ms = np.nan_to_num(times_ms)
    whole = np.floor(times_ms)
    return whole.astype(np.int64) * 1_000_000 + np.rint((times_ms - whole) * 1e6).astype(np.int64)
