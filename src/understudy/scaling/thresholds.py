"""Scaling by queues and cache use against fixed thresholds: the planner without a latency goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.metrics import PassSnapshot, Role
    from understudy.scaling.planner_settings import PlannerSettings


def wanted_by_thresholds(
    settings: PlannerSettings,
    role: Role,
    worker: WorkerCapabilities,
    snapshots: Sequence[PassSnapshot],
    workers: int,
) -> int | None:
    """Return the number of workers that the thresholds ask for; None: no opinion.

    One busy worker is enough for one more. One less needs all below the lower threshold, and the busiest below the
    upper one after it took over its share of another's load.
    """
    values = _loads(settings, role, worker, snapshots)
    if values is None or workers == 0:
        return None
    up, down = settings.thresholds(role)
    by_load = settings.optimization_target == "load"
    highest = max(values)
    if highest > up or (highest == up and (by_load or role == "prefill")):
        return workers + 1
    at_most = by_load or (settings.optimization_target == "latency" and role == "prefill")
    if workers <= 1 or not (highest < down or (at_most and highest == down)):
        return None
    if highest * (workers / (workers - 1)) >= up:
        return None
    return max(workers - 1, settings.floor(role))


def _loads(
    settings: PlannerSettings, role: Role, worker: WorkerCapabilities, snapshots: Sequence[PassSnapshot]
) -> list[float] | None:
    if not snapshots:
        return None
    if role == "prefill":
        queued = [one["sum_queued_prefill_tokens"] for one in snapshots]
        if settings.optimization_target == "load":
            return [float(tokens) for tokens in queued]
        return [tokens / worker.context_length for tokens in queued] if worker.context_length else None
    whole = settings.mode == "agg"
    return [
        (
            one["sum_decode_kv_tokens"]
            + one["sum_queued_decode_kv_tokens"]
            + whole * one["sum_queued_prefill_tokens"]
        )
        / worker.max_kv_tokens
        for one in snapshots
    ]
