"""Summarize and write the decisions of a KV-aware router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.workload.files import create_trace

if TYPE_CHECKING:
    from os import PathLike

    from understudy.router.kv import Decisions
    from understudy.run.timeline import Timeline


def summarise_decisions(decisions: Decisions, timeline: Timeline, block_size: int) -> dict[str, float]:
    """Summarize predicted and actual hits (shares of prompt tokens), regret (blocks) and imbalance."""
    if not len(decisions):
        return {"decisions": 0}
    rows = decisions.rows
    tokens = timeline.prompt_tokens[rows].astype(np.int64)
    by_worker = np.bincount(decisions.worker, weights=tokens, minlength=timeline.num_workers)

    def share(blocks: Any) -> float:
        return float((blocks.astype(np.int64) * block_size).sum() / tokens.sum())

    return {
        "decisions": len(decisions),
        "predicted_hit": share(decisions.overlap_blocks),
        "held_hit": share(decisions.true_overlap_blocks),
        "actual_hit": float(timeline.cached_tokens_first[rows].sum() / tokens.sum()),
        "best_hit": share(decisions.best_true_overlap_blocks),
        "mean_cost_regret_blocks": float(decisions.cost_regret.mean()),
        "regretted": float((decisions.cost_regret > 0).mean()),
        "tied": float((decisions.ties > 1).mean()),
        "imbalance": float(by_worker.max() / by_worker.mean()),
        "waited": float((decisions.waited_ns > 0).mean()),
        "mean_wait_ms": float(decisions.waited_ns.mean() / 1e6),
    }


def write_decisions(path: str | PathLike[str], decisions: Decisions, timeline: Timeline) -> None:
    """Write one JSON line per decision, in order. InvalidArgument when the file cannot be written."""
    names = [name for name in decisions.__struct_fields__ if name != "rows"]
    columns = {"row": decisions.rows.tolist()} | {name: getattr(decisions, name).tolist() for name in names}
    columns["cached_tokens"] = timeline.cached_tokens_first[decisions.rows].tolist()
    with create_trace(path) as file:
        lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        file.write(msgspec.json.Encoder().encode_lines(lines))
