"""Records that pass between a fleet and its scaler; keys as in Dynamo's planner, which therefore plugs in unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

Role = Literal["prefill", "decode"]
"""Workers that do both are called `decode`."""
ROLES: tuple[Role, Role] = ("prefill", "decode")


class PassSnapshot(TypedDict):
    """The latest forward pass of one rank of a worker, and its queue after that."""

    worker_id: int
    dp_rank: int
    wall_time: float
    """Duration in s."""
    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float
    num_queued_prefill: int
    sum_queued_prefill_tokens: int
    var_queued_prefill_length: float
    num_queued_decode: int
    sum_queued_decode_kv_tokens: int
    var_queued_decode_kv_tokens: float


class Traffic(TypedDict):
    """Requests since the last tick: how many arrived, and averages over those that ended."""

    duration_s: float
    num_req: float
    avg_isl: float
    avg_osl: float
    avg_ttft_ms: float
    avg_itl_ms: float
    shape_count: float
    ttft_count: float
    itl_count: float
    avg_accept_length: float | None
    avg_kv_hit_rate: float
    hit_rate_count: float
    accept_length_forward_count: float


class TickMetrics(TypedDict):
    """The fleet at a tick."""

    tick_ordinal: int
    now_ms: float
    prefill_fpm_snapshots: Sequence[PassSnapshot]
    decode_fpm_snapshots: Sequence[PassSnapshot]
    active_prefill_count: int
    active_prefill_ids: Sequence[int]
    starting_prefill_count: int
    starting_prefill_ids: Sequence[int]
    draining_prefill_count: int
    draining_prefill_ids: Sequence[int]
    non_draining_prefill_count: int
    total_prefill_count: int
    active_decode_count: int
    active_decode_ids: Sequence[int]
    starting_decode_count: int
    starting_decode_ids: Sequence[int]
    draining_decode_count: int
    draining_decode_ids: Sequence[int]
    non_draining_decode_count: int
    total_decode_count: int
    traffic: NotRequired[Traffic | None]


class Decision(TypedDict):
    """Wanted numbers of workers that are not draining, and the time of the next tick.

    None: no change of a number, or no further tick.
    """

    target_prefill: int | None
    target_decode: int | None
    next_tick_ms: float | None


def merge_traffic(before: Traffic | None, window: Traffic) -> Traffic:
    """Combine two windows of traffic: counts add up, averages are weighted by their own counts."""
    if before is None:
        return window

    def mean(value: float, count: float, other: float, other_count: float) -> float:
        total = count + other_count
        return (value * count + other * other_count) / total if total > 0 else 0.0

    accept, forwards = before["avg_accept_length"], before["accept_length_forward_count"]
    window_accept, window_forwards = window["avg_accept_length"], window["accept_length_forward_count"]
    if accept is None:
        accepted = window_accept
    elif window_accept is None:
        accepted = accept
    else:
        accepted = (
            mean(accept, forwards, window_accept, window_forwards) if forwards + window_forwards else None
        )
    shapes = before["shape_count"], window["shape_count"]
    return {
        "duration_s": before["duration_s"] + window["duration_s"],
        "num_req": before["num_req"] + window["num_req"],
        "avg_isl": mean(before["avg_isl"], shapes[0], window["avg_isl"], shapes[1]),
        "avg_osl": mean(before["avg_osl"], shapes[0], window["avg_osl"], shapes[1]),
        "avg_ttft_ms": mean(
            before["avg_ttft_ms"], before["ttft_count"], window["avg_ttft_ms"], window["ttft_count"]
        ),
        "avg_itl_ms": mean(
            before["avg_itl_ms"], before["itl_count"], window["avg_itl_ms"], window["itl_count"]
        ),
        "shape_count": sum(shapes),
        "ttft_count": before["ttft_count"] + window["ttft_count"],
        "itl_count": before["itl_count"] + window["itl_count"],
        "avg_accept_length": accepted,
        "avg_kv_hit_rate": mean(
            before["avg_kv_hit_rate"],
            before["hit_rate_count"],
            window["avg_kv_hit_rate"],
            window["hit_rate_count"],
        ),
        "hit_rate_count": before["hit_rate_count"] + window["hit_rate_count"],
        "accept_length_forward_count": forwards + window_forwards,
    }
