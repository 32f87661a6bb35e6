"""Cut a time window out of a workload, such as its busiest hour."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.text import duration

if TYPE_CHECKING:
    from understudy.workload.workload import Workload

_STEPS = 12
"""The busiest window slides by this part of its length."""


def cut_window(workload: Workload, start_s: float = 0.0, end_s: float | None = None) -> Workload:
    """Return the sessions that begin from `start_s` until before `end_s` after the first arrival, whole.

    Arrivals are shifted to begin with 0; a note has the window. InvalidArgument without times, or if none is left.
    """
    if not workload.has_arrivals:
        raise InvalidArgument("the requests have no times, so no window can be cut; convert with --time KEY")
    begins = workload.arrival_ns - workload.arrival_ns.min(
        initial=0 if not len(workload) else workload.arrival_ns[0]
    )
    rows = np.flatnonzero((begins >= start_s * 1e9) & (begins < (np.inf if end_s is None else end_s * 1e9)))
    until = "the end" if end_s is None else duration(end_s)
    if not len(rows):
        raise InvalidArgument(
            f"no request begins from {duration(start_s)} until {until}; choose another window"
        )
    note = (
        f"{len(rows):,} of {len(workload):,} requests: those whose sessions begin from {duration(start_s)} until "
        f"{until} after the first"
    )
    return replace(workload.take(rows).normalised(), notes=(*workload.notes, note))


def cut_busiest(workload: Workload, length_s: float) -> Workload:
    """Return the window of this length whose sessions have the most tokens; errors as `cut_window`."""
    if not workload.has_arrivals or not len(workload):
        return cut_window(workload)
    begins = (workload.arrival_ns - workload.arrival_ns.min()) / 1e9
    step = length_s / _STEPS
    tokens = workload.prompt_tokens.astype(np.float64) + workload.output_tokens
    sums = np.concatenate(([0.0], np.cumsum(np.bincount((begins // step).astype(np.int64), tokens))))
    last = max(len(sums) - 1 - _STEPS, 0)
    windows = sums[np.minimum(np.arange(last + 1) + _STEPS, len(sums) - 1)] - sums[: last + 1]
    start = int(windows.argmax()) * step
    return cut_window(workload, start, start + length_s)
