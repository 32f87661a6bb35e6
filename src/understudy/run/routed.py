"""Summarize and write the decisions of routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.router.choices import Choices
from understudy.router.kv import Decisions
from understudy.workload.files import create_trace

if TYPE_CHECKING:
    from os import PathLike

    from understudy.run.timeline import Timeline


LINES_AT_ONCE = 4096
"""Decisions that are in memory as lines at one time."""


def summarise_decisions(
    decisions: Decisions | Choices, timeline: Timeline, block_size: int
) -> dict[str, float]:
    """Summarize cached and actual hits (shares of prompt tokens), regret (blocks) and imbalance.

    Costs, predictions and waiting times are those of a KV-aware router (`Decisions`).
    """
    if not len(decisions):
        return {"decisions": 0}
    rows = decisions.rows
    tokens = timeline.prompt_tokens[rows].astype(np.int64)
    by_worker = np.bincount(decisions.worker, weights=tokens, minlength=timeline.num_workers)

    def share(blocks: Any) -> float:
        return float((blocks.astype(np.int64) * block_size).sum() / tokens.sum())

    regret = _regret_blocks(decisions)
    summary = {
        "decisions": len(decisions),
        "held_hit": share(decisions.true_overlap_blocks),
        "actual_hit": float(timeline.cached_tokens_first[rows].sum() / tokens.sum()),
        "best_hit": share(decisions.best_true_overlap_blocks),
        "mean_cache_regret_blocks": float(regret.mean()),
        "cache_regretted": float((regret > 0).mean()),
        "imbalance": float(by_worker.max() / by_worker.mean()),
    }
    if isinstance(decisions, Choices):
        return summary
    return summary | {
        "predicted_hit": share(decisions.overlap_blocks),
        "mean_cost_regret_blocks": float(decisions.cost_regret.mean()),
        "regretted": float((decisions.cost_regret > 0).mean()),
        "tied": float((decisions.ties > 1).mean()),
        "waited": float((decisions.waited_ns > 0).mean()),
        "mean_wait_ms": float(decisions.waited_ns.mean() / 1e6),
    }


def write_decisions(path: str | PathLike[str], decisions: Decisions | Choices, timeline: Timeline) -> None:
    """Write one JSON line per decision, in order; null: the router does not know it.

    InvalidArgument when the file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    with create_trace(path) as file:
        for first in range(0, len(decisions), LINES_AT_ONCE):
            last = min(first + LINES_AT_ONCE, len(decisions))
            columns = _list_columns(decisions, timeline, first, last)
            values = zip(*columns.values(), strict=True)
            file.write(encoder.encode_lines([dict(zip(columns, row, strict=True)) for row in values]))


def _list_columns(
    decisions: Decisions | Choices, timeline: Timeline, first: int, last: int
) -> dict[str, list[Any]]:
    """Return the lines of decisions `first` to before `last`, by field."""
    part, count = slice(first, last), last - first
    rows = decisions.rows[part]
    columns: dict[str, list[Any]] = {"row": rows.tolist()}
    for name in Decisions.__struct_fields__[1:-1]:
        column = getattr(decisions, name, None)
        columns[name] = [None] * count if column is None else column[part].tolist()
    columns["cached_tokens"] = timeline.cached_tokens_first[rows].tolist()
    columns["cache_regret_tokens"] = (_regret_blocks(decisions)[part] * timeline.block_size).tolist()
    candidates: list[Any] = [None] * count
    scores: list[float | None] = [None] * count
    reasons: list[str | None] = [None] * count
    if isinstance(decisions, Choices):
        columns["waited_ns"] = [0] * count
        if decisions.candidates is not None:
            candidates = list(decisions.candidates.describe(timeline.block_size, first, last))
        if decisions.scores:
            scores, reasons = list(decisions.scores[part]), list(decisions.reasons[part])
    elif decisions.candidates is not None:
        candidates = list(decisions.candidates.describe(first, last))
    return {**columns, "candidates": candidates, "score": scores, "reason": reasons}


def _regret_blocks(decisions: Decisions | Choices) -> Any:
    """Return the cached prompt blocks of the best worker above those of the chosen one, per decision."""
    return (decisions.best_true_overlap_blocks - decisions.true_overlap_blocks).astype(np.int64)
