"""Convert milliseconds, as in traces and settings, to int64 nanoseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column


def milliseconds_to_ns(times_ms: NDArray[np.float64]) -> Int64Column:
    """Convert each time to nanoseconds, rounded once, half to even; NaN becomes 0.

    The whole and fractional parts are converted separately, so large times stay exact. Times must be below 2^63 ns.
    """
    times_ms = np.nan_to_num(times_ms)
    whole = np.floor(times_ms)
    return whole.astype(np.int64) * 1_000_000 + np.rint((times_ms - whole) * 1e6).astype(np.int64)
