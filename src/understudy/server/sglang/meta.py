"""The `meta_info` of an answer, and its finish reason, as SGLang gives them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.generation import Generation


def finish_reason(generation: Generation, choice: Choice) -> dict[str, Any]:
    """Return how an answer ended."""
    plan, request = choice.plan, choice.request
    if plan.finish == "length":
        return {"type": "length", "length": plan.limit}
    if plan.finish == "stop":
        matched = plan.stop_reason
        return {"type": "stop", "matched": generation.worker.tokenizer.end_id if matched is None else matched}
    if request is None or request.admitted_ns < 0:
        return {"type": "abort", "message": "Abort in waiting queue"}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def cached_details(choice: Choice) -> dict[str, int] | None:
    """Return the cached tokens of a prompt by tier; None if there are none."""
    request = choice.request
    if request is None or request.cached_tokens == 0:
        return None
    host = sum(request.below_tokens)
    return {"device": request.cached_tokens - host, "host": host}


def meta_info(generation: Generation, choice: Choice, tokens: int, *, last: bool) -> dict[str, Any]:
    """Describe an answer after `tokens` of its tokens; with `last`, also its end."""
    request = choice.request
    assert request is not None
    version = generation.worker.weight_version
    ended_s = (max(request.finish_ns, request.last_token_ns) - request.arrival_ns) / 1e9
    if last and choice.plan.finish == "abort" and request.admitted_ns < 0:
        return {
            "id": generation.request_name(choice),
            "finish_reason": finish_reason(generation, choice),
            "weight_version": version,
            "e2e_latency": ended_s,
            "completion_tokens": tokens,
        }
    meta: dict[str, Any] = {
        "id": generation.request_name(choice),
        "finish_reason": finish_reason(generation, choice) if last else None,
        "prompt_tokens": len(choice.prompt),
        "weight_version": version,
        "num_retractions": request.preemptions,
        "reasoning_tokens": 0,
        "completion_tokens": tokens,
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": cached_details(choice),
        "dp_rank": None,
    }
    if last:
        meta["e2e_latency"] = ended_s
    if last or choice.sent <= 1:
        meta["response_sent_to_client_ts"] = time.time()
    return meta
