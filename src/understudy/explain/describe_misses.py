"""Describe the causes of missed prompt tokens as plain JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import InvalidArgument
from understudy.explain.misses import CAUSES

if TYPE_CHECKING:
    from understudy.explain.misses import MissColumns
    from understudy.explain.saved_run import SavedRun

MOST_NAMED = 5
"""Requests that are named for having needed the room."""
_NAMES = list(CAUSES)


def require_misses(run: SavedRun) -> MissColumns:
    """Return the misses of a run. InvalidArgument where it has none."""
    if run.misses is None:
        raise InvalidArgument(
            "--misses: the run has no causes of misses; save it again, with vLLM's engine, prefix caching, and "
            "without prefill and decode workers"
        )
    return run.misses


def describe_misses(run: SavedRun) -> dict[str, Any]:
    """Sum the missed prompt tokens of all first admissions by cause."""
    misses = require_misses(run)
    admitted = run.requests["first_admit_ns"] >= 0
    evicted = misses.by >= 0
    requests, inverse = np.unique(misses.by[evicted], return_inverse=True)
    tokens = np.bincount(inverse.reshape(-1), weights=misses.tokens[evicted], minlength=len(requests))
    most = np.argsort(-tokens, kind="stable")[:MOST_NAMED]
    return {
        "prompt_tokens": int(run.requests["prompt_tokens"][admitted].sum()),
        "cached_tokens": int(run.requests["cached_tokens_first"][admitted].sum()),
        "missed_tokens": int(misses.tokens.sum()),
        "causes": misses.totals(),
        "cause_names": CAUSES,
        "evicted_for": [
            {"request": run.name(int(requests[at])), "tokens": int(tokens[at])} for at in most.tolist()
        ],
    }


def list_misses(run: SavedRun, row: int) -> list[dict[str, Any]]:
    """List the missed tokens of a request by runs with one cause."""
    misses = require_misses(run)
    first, last = np.searchsorted(misses.request, [row, row + 1]).tolist()
    found = []
    for at in range(first, last):
        about: dict[str, Any] = {
            "first_token": int(misses.first[at]),
            "tokens": int(misses.tokens[at]),
            "cause": _NAMES[misses.cause[at]],
        }
        if misses.at_ns[at] >= 0:
            about["evicted_ns"] = int(misses.at_ns[at])
            about["evicted_for"] = None if misses.by[at] < 0 else run.name(int(misses.by[at]))
        found.append(about)
    return found
