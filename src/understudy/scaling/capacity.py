"""The request rate that one worker can sustain within latency goals, as Dynamo's planner computes it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from understudy.scaling.estimates import PassLoad, clamp_hit_rate, sum_of_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import PassTime

MAX_CANDIDATES = 128
"""Batch sizes that are tried."""


def prefill_rps(
    pass_time: PassTime, worker: WorkerCapabilities, isl: float, ttft_ms: float, hit_rate: float | None
) -> float:
    """Return prompts per second of a prefill worker; 0 if it computes none."""
    prompt = _computed_prompt(isl, hit_rate)
    limit = worker.max_num_batched_tokens
    most = 1 if prompt > limit else min(worker.max_num_seqs, limit // prompt)
    candidates = []
    for batch in _batches(most):
        first_ms = sum_of_chunks(prompt * batch, limit, lambda chunk: pass_time(PassLoad(1, chunk)))
        if first_ms > 0:
            candidates.append((first_ms <= ttft_ms, batch / (first_ms / 1000)))
    return _best(candidates)


def decode_rps(
    pass_time: PassTime,
    worker: WorkerCapabilities,
    isl: float,
    osl: float,
    itl_ms: float,
    accepted: float = 1.0,
) -> float:
    """Return requests per second of a decode worker; 0 if not one fits."""
    answer, context = _answer(osl), _context(isl, osl)
    candidates = []
    for batch in _batches(min(worker.max_num_seqs, worker.max_kv_tokens // context)):
        token_ms = pass_time(PassLoad(0, 0, batch, batch * context)) / accepted
        if token_ms > 0:
            candidates.append((token_ms <= itl_ms, batch / (answer * (token_ms / 1000))))
    return _best(candidates)


def whole_rps(
    pass_time: PassTime,
    worker: WorkerCapabilities,
    isl: float,
    osl: float,
    ttft_ms: float,
    itl_ms: float,
    hit_rate: float | None,
    accepted: float = 1.0,
) -> float:
    """Return requests per second of a worker that computes prompts and answers; 0 if not one fits.

    Every pass has the share of prompt tokens that keeps up with the answers that end.
    """
    limit = worker.max_num_batched_tokens
    prompt, answer, context = _computed_prompt(isl, hit_rate), _answer(osl), _context(isl, osl)
    most = min(worker.max_num_seqs, worker.max_kv_tokens // context, max(1, limit - 1))
    candidates = []
    for batch in _batches(most):
        share = math.ceil(batch * accepted * prompt / answer)
        if share > limit - batch:
            continue
        token_ms = pass_time(PassLoad(1, share, batch, batch * context)) / accepted
        if token_ms <= 0:
            continue
        first_ms = sum_of_chunks(share + prompt, limit, partial(_mixed_ms, pass_time, batch, context))
        meets = first_ms <= ttft_ms and token_ms <= itl_ms
        candidates.append((meets, batch / (answer * (token_ms / 1000))))
    return _best(candidates)


def _mixed_ms(pass_time: PassTime, batch: int, context: int, chunk: int) -> float:
    return pass_time(PassLoad(1, chunk, batch, batch * context))


def _best(candidates: list[tuple[bool, float]]) -> float:
    """Return the highest rate of those that meet the goals, or of all if none does."""
    return max(candidates, default=(False, 0.0))[1]


def _batches(most: int) -> Iterator[int]:
    if most <= MAX_CANDIDATES:
        yield from range(1, most + 1)
        return
    for index in range(MAX_CANDIDATES):
        yield 1 + index * (most - 1) // (MAX_CANDIDATES - 1)


def _computed_prompt(isl: float, hit_rate: float | None) -> int:
    return max(1, math.ceil(math.ceil(isl) * (1.0 - clamp_hit_rate(hit_rate))))


def _answer(osl: float) -> int:
    return max(1, math.ceil(osl))


def _context(isl: float, osl: float) -> int:
    return max(1, math.ceil(isl) + _answer(osl) // 2)
