"""Find the knee of an endpoint: the highest rate, or the most users, that it still serves in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.online.load_result import LoadResult

QUEUE_GROWS = 2.0
"""Without objectives: the last quarter's median TTFT from which a load is too much, in those of the lowest load."""
MOST_LOADS = 14
_PRECISION = 1.15
"""Ratio of the lowest load that is too much to the knee at which the search ends."""


def is_served(result: LoadResult, lowest: LoadResult, goal: float) -> bool:
    """Return whether the endpoint keeps up: enough requests in time or, without objectives, no growing queue."""
    if result.in_time is not None:
        return result.in_time >= goal
    return not result.failed and result.late_ttft_ms <= QUEUE_GROWS * lowest.early_ttft_ms


def find_knee(
    measure: Callable[[float], LoadResult], first: float, goal: float, *, whole: bool = False
) -> tuple[float | None, list[LoadResult]]:
    """Double the load until it is too much, then bisect; return the highest one that is served, and all results.

    None: even the first load is too much. `whole`: loads are whole numbers. At most `MOST_LOADS` loads.
    """
    results: list[LoadResult] = []
    served: float | None = None
    at = first
    while len(results) < MOST_LOADS:
        results.append(measure(at))
        if not is_served(results[-1], results[0], goal):
            break
        served, at = at, 2 * at
    else:
        return served, results
    if served is None:
        return None, results
    above = at
    while above / served > _PRECISION and len(results) < MOST_LOADS:
        middle = (served * above) ** 0.5
        middle = float(round(middle)) if whole else float(f"{middle:.3g}")
        if not served < middle < above:
            break
        results.append(measure(middle))
        if is_served(results[-1], results[0], goal):
            served = middle
        else:
            above = middle
    return served, results
