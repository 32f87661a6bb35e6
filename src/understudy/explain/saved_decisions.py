"""Columns of a saved run that say why the router chose a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.router.choices import Choices
from understudy.router.kv_candidates import TERMS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.router.kv import Decisions
    from understudy.router.kv_candidates import KvCandidates

DECISION_COLUMNS = (
    "rows",
    "time_ns",
    "worker",
    "cost",
    "overlap_blocks",
    "best_overlap_blocks",
    "true_overlap_blocks",
    "cost_regret",
    "waited_ns",
)
"""Columns of a KV-aware router's decisions that a saved run has."""
CHOICE_COLUMNS = ("rows", "time_ns", "worker", "true_overlap_blocks", "best_true_overlap_blocks")
"""Columns of a user-defined router's choices that a saved run has."""
COST_TERMS = tuple(f"cost_{name}" for name in TERMS)
"""Further columns of a KV-aware router: the terms of the chosen worker's cost."""


def describe_decisions(decisions: Decisions | Choices) -> dict[str, NDArray[Any]]:
    """Return the columns to save, by name; those of candidates and scores only where they were kept."""
    names = CHOICE_COLUMNS if isinstance(decisions, Choices) else DECISION_COLUMNS
    columns: dict[str, NDArray[Any]] = {name: getattr(decisions, name) for name in names}
    if isinstance(decisions, Choices):
        if any(score is not None for score in decisions.scores):
            scores = [np.nan if score is None else score for score in decisions.scores]
            columns["score"] = np.array(scores, np.float64)
    elif decisions.candidates is not None:
        columns |= _describe_candidates(decisions.candidates, decisions.worker)
    return columns


def _describe_candidates(candidates: KvCandidates, chosen: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """Return the terms of each chosen worker, and the cheapest other worker with its cost (-1, NaN: there was none)."""
    ends = candidates.ends
    decision = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    is_chosen = candidates.worker == chosen[decision]
    at = np.flatnonzero(is_chosen)
    columns: dict[str, NDArray[Any]] = {f"cost_{name}": getattr(candidates, name)[at] for name in TERMS}
    others = np.flatnonzero(~is_chosen)
    cost = candidates.cost
    order = others[np.lexsort((cost[others], decision[others]))]
    _, first = np.unique(decision[order], return_index=True)
    nearest = np.full(len(ends), -1, np.int64)
    nearest_cost = np.full(len(ends), np.nan)
    nearest[decision[order[first]]] = candidates.worker[order[first]]
    nearest_cost[decision[order[first]]] = cost[order[first]]
    return {**columns, "next_worker": nearest, "next_cost": nearest_cost}
