"""Numbers of one worker that scalers compare with targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.metrics import PassSnapshot, Role

METRICS: dict[str, Callable[[PassSnapshot, WorkerCapabilities], float]] = {
    "queued_requests": lambda seen, _: seen["num_queued_prefill"] + seen["num_queued_decode"],
    "queued_tokens": lambda seen, _: seen["sum_queued_prefill_tokens"],
    "running_requests": lambda seen, _: seen["num_prefill_requests"] + seen["num_decode_requests"],
    "kv_use": lambda seen, worker: kv_tokens(seen) / worker.max_kv_tokens,
}
"""By name: of the latest pass of a worker and the queue after it."""


def measure_worker(name: str, seen: PassSnapshot, worker: WorkerCapabilities) -> float:
    """Return a metric of a worker."""
    return float(METRICS[name](seen, worker))


def kv_tokens(seen: PassSnapshot) -> int:
    """Return the tokens whose KV a worker's running requests hold."""
    return seen["sum_decode_kv_tokens"] + seen["sum_prefill_tokens"] + seen["sum_prefill_kv_tokens"]


def queued_tokens(seen: PassSnapshot) -> int:
    """Return the tokens whose KV a worker's queued requests will need."""
    return seen["sum_queued_prefill_tokens"] + seen["sum_queued_decode_kv_tokens"]


def roles_of(capabilities: Mapping[str, WorkerCapabilities]) -> tuple[Role, ...]:
    """Return the roles of a fleet."""
    return ("prefill", "decode") if "prefill" in capabilities else ("decode",)
