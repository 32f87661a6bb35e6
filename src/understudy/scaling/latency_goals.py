"""Scaling by estimated latencies against goals: the planner with `optimization_target: sla`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import LatencyEstimates
    from understudy.scaling.metrics import PassSnapshot, Role
    from understudy.scaling.planner_settings import PlannerSettings


def wanted_for_first_token(
    settings: PlannerSettings,
    role: Role,
    estimates: LatencyEstimates,
    snapshots: Sequence[PassSnapshot],
    workers: int,
    hit_rate: float | None,
) -> int:
    """Return the number of workers that the goal for the first token asks for.

    One more if every worker misses it. One less if, with one worker less, the part of the wait that queues cause stays
    within the share `load_scaling_down_sensitivity` of what the goal leaves.
    """
    whole = settings.mode == "agg"
    share = settings.load_scaling_down_sensitivity / 100.0
    more = workers / (workers - 1) if workers > 1 else 1.0
    if all(estimates.first_token_ms(seen, hit_rate) > settings.ttft_ms for seen in snapshots):
        return workers + 1
    if workers <= 1:
        return workers
    for seen in snapshots:
        decode = more if whole else 1.0
        own_ms = estimates.first_token_ms(
            seen, hit_rate, queue_scale=0.0, decode_scale=decode, with_queued_decode=whole
        )
        left_ms = (settings.ttft_ms - own_ms) * share
        then_ms = estimates.first_token_ms(
            seen, hit_rate, queue_scale=more, decode_scale=decode, with_queued_decode=whole
        )
        if left_ms <= 0 or then_ms - own_ms >= left_ms:
            return workers
    return max(workers - 1, settings.floor(role))


def wanted_between_tokens(
    settings: PlannerSettings,
    estimates: LatencyEstimates,
    worker: WorkerCapabilities,
    snapshots: Sequence[PassSnapshot],
    workers: int,
    accepted: float,
) -> int:
    """Return the number of workers that the goal between tokens asks for.

    One more if every worker misses it. One less if, with one worker less, each one's KV fits its cache and a pass stays
    within the share `load_scaling_down_sensitivity` of the goal.
    """
    whole = settings.mode == "agg"
    share = settings.load_scaling_down_sensitivity / 100.0
    more = workers / (workers - 1) if workers > 1 else 1.0
    if all(estimates.between_tokens_ms(seen) / accepted > settings.itl_ms for seen in snapshots):
        return workers + 1
    if workers <= 1:
        return workers
    for seen in snapshots:
        held = seen["sum_decode_kv_tokens"] + seen["sum_queued_decode_kv_tokens"]
        held += whole * seen["sum_queued_prefill_tokens"]
        if int(held * more) >= worker.max_kv_tokens:
            return workers
        then_ms = estimates.between_tokens_ms(seen, decode_scale=more, with_queued_prefill=whole)
        if then_ms / accepted >= settings.itl_ms * share:
            return workers
    return max(workers - 1, settings.floor("decode"))


def combine_goals(for_first: int, between: int, workers: int) -> int:
    """Return the wish of both goals for workers that compute prompts and answers: up if either, down if both."""
    if for_first > workers or between > workers:
        return workers + 1
    return max(for_first, between)
