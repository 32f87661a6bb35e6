"""Timelines for the tests: a few requests given by hand, or a seeded crowd that looks like a real run."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.run.timeline import Status, Timeline

MS = 1_000_000


@dataclass
class Row:
    """A request by hand; times in ms. Completed unless told otherwise."""

    tokens_ms: list[float] = field(default_factory=list)
    arrival_ms: float = 0
    queued_ms: float | None = None  # at once, unless told otherwise
    admit_ms: float | None = None
    finish_ms: float | None = None
    prompt_tokens: int = 10
    requested: int | None = None
    cached_first: int = 0
    cached_total: int | None = None
    looked_up: int | None = None  # the prompt at every admission
    preemptions: int = 0
    worker: int = 0
    status: Status = Status.COMPLETED


def timeline(*rows: Row, **overrides: Any) -> Timeline:
    """Build the timeline of these requests; `overrides` replace whole columns or scalars."""

    def times(values: list[float | None]) -> list[int]:
        return [-1 if value is None else round(value * MS) for value in values]

    gaps: dict[int, int] = {}
    for row in rows:
        if row.status == Status.COMPLETED:
            stamps = times([*row.tokens_ms])
            for early, late in itertools.pairwise(stamps):
                gaps[late - early] = gaps.get(late - early, 0) + 1
    tokens = [row.tokens_ms for row in rows]
    admits = [
        row.arrival_ms if row.admit_ms is None and row.status == Status.COMPLETED else row.admit_ms
        for row in rows
    ]
    finishes = [
        None
        if row.status == Status.UNFINISHED
        else row.finish_ms
        if row.finish_ms is not None
        else max([row.arrival_ms, *row.tokens_ms])
        for row in rows
    ]
    columns: dict[str, Any] = {
        "arrival_ns": times([row.arrival_ms for row in rows]),
        "queued_ns": times(
            [
                row.arrival_ms if row.queued_ms is None and admit is not None else row.queued_ms
                for row, admit in zip(rows, admits, strict=True)
            ]
        ),
        "first_admit_ns": times(admits),
        "first_token_ns": times([t[0] if t else None for t in tokens]),
        "second_token_ns": times([t[1] if len(t) > 1 else None for t in tokens]),
        "last_token_ns": times([t[-1] if t else None for t in tokens]),
        "finish_ns": times(finishes),
        "prompt_tokens": [row.prompt_tokens for row in rows],
        "requested_output_tokens": [
            len(row.tokens_ms) if row.requested is None else row.requested for row in rows
        ],
        "output_tokens": [len(t) for t in tokens],
        "cached_tokens_first": [row.cached_first for row in rows],
        "cached_tokens_total": [
            row.cached_first if row.cached_total is None else row.cached_total for row in rows
        ],
        "looked_up_tokens": [
            (row.prompt_tokens * (1 + row.preemptions) if admit is not None else 0)
            if row.looked_up is None
            else row.looked_up
            for row, admit in zip(rows, admits, strict=True)
        ],
        "preemptions": [row.preemptions for row in rows],
        "worker": [row.worker for row in rows],
        "status": [int(row.status) for row in rows],
        "finish_reason": [int(row.status == Status.COMPLETED) for row in rows],  # all by length
        "session": list(range(len(rows))),
        "turn": [0] * len(rows),
        "itl_ns": sorted(gaps),
        "itl_count": [gaps[gap] for gap in sorted(gaps)],
        **{f"sample_{name}": [] for name in ("time_ns", "worker", "running", "waiting")},
        **{f"sample_{name}_blocks": [] for name in ("used", "cached")},
        "num_workers": 1,
        "blocks_per_worker": 100,
        "block_size": 16,
        "steps": 0,
        "evictions": 0,
        "stored_blocks": 0,
    }
    return Timeline(**{**columns, **overrides})


def crowd(
    requests: int, *, seed: int = 0, num_workers: int = 4, mean_output: int = 180, rate_per_s: float = 3.4
) -> Timeline:
    """Simulate a crude queue: bursty arrivals, a few seats on each worker, a prefix cache that warms up."""
    rng = np.random.default_rng(seed)
    wave = 1 + 0.6 * np.sin(np.linspace(0, 9, requests))
    arrival = np.cumsum(rng.exponential(1e9 / rate_per_s, requests) / wave).astype(np.int64)
    prompt = np.clip(rng.lognormal(8.6, 1.0, requests), 16, 120_000).astype(np.int64)
    output = np.clip(rng.lognormal(np.log(mean_output) - 0.3, 0.8, requests), 0, 2000).astype(np.int64)
    output[rng.random(requests) < 0.002] = 0
    warm = np.minimum(1, np.arange(requests) / max(requests / 3, 1))
    cached = (prompt * warm * np.clip(rng.beta(0.6, 1.4, requests), 0, 1)).astype(np.int64) // 64 * 64
    status = np.zeros(requests, np.uint8)
    status[rng.random(requests) < 0.0015] = Status.REJECTED
    worker = (np.arange(requests) % num_workers).astype(np.int32)
    worker[status == Status.REJECTED] = -1
    requested = output.astype(np.int32)
    output[status == Status.REJECTED] = 0
    cached[status == Status.REJECTED] = 0

    admit, first, second, last = (np.full(requests, -1, np.int64) for _ in range(4))
    finish = arrival.copy()
    gaps: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    seats = [[0] * 5 for _ in range(num_workers)]
    for i in range(requests):
        if status[i]:
            continue
        seat = seats[worker[i]]
        admit[i] = max(int(arrival[i]), heapq.heappop(seat))
        finish[i] = admit[i] + 2_000_000 + (prompt[i] - cached[i]) * 60_000
        if output[i]:
            first[i] = finish[i]
            own = rng.normal(9.5e6, 1.2e6, output[i] - 1) + rng.exponential(9e6, output[i] - 1) ** 1.01
            gap = np.maximum(own, 1e6).astype(np.int64) // 500 * 500
            gaps.append(gap)
            last[i] = finish[i] = first[i] + int(gap.sum())
            if output[i] > 1:
                second[i] = first[i] + gap[0]
        heapq.heappush(seat, int(finish[i]))
    itl, itl_count = np.unique(np.concatenate([*gaps, np.empty(0, np.int64)]), return_counts=True)
    served = status == 0
    return Timeline(
        arrival_ns=arrival,
        queued_ns=np.where(admit >= 0, arrival, -1),
        first_admit_ns=admit,
        first_token_ns=first,
        second_token_ns=second,
        last_token_ns=last,
        finish_ns=finish,
        prompt_tokens=prompt.astype(np.int32),
        requested_output_tokens=requested,
        output_tokens=output.astype(np.int32),
        cached_tokens_first=cached.astype(np.int32),
        cached_tokens_total=cached,
        looked_up_tokens=np.where(status == 0, prompt, 0),
        preemptions=np.zeros(requests, np.int32),
        worker=worker,
        status=status,
        finish_reason=(status == Status.COMPLETED).astype(np.uint8),
        session=np.arange(requests, dtype=np.int32),
        turn=np.zeros(requests, np.int32),
        itl_ns=itl,
        itl_count=itl_count,
        **_samples(arrival[served], admit[served], finish[served], (prompt + output)[served], worker[served]),
        num_workers=num_workers,
        blocks_per_worker=16_384,
        block_size=64,
        steps=requests * 12,
        evictions=requests * 7,
        stored_blocks=requests * 9,
        reject_reasons={
            int(i): f"prompt of {prompt[i]} tokens needs more blocks than a worker has"
            for i in np.flatnonzero(status == Status.REJECTED)
        },
    )


def _samples(arrival: Any, admit: Any, finish: Any, tokens: Any, worker: Any) -> dict[str, Any]:
    """Sample a worker whenever one of its requests arrives, is admitted or finishes."""
    n = len(arrival)
    blocks = -(-tokens // 64)
    zero = np.zeros(n, np.int64)
    time = np.concatenate([arrival, admit, finish])
    who = np.concatenate([worker] * 3)
    running = np.concatenate([zero, zero + 1, zero - 1])
    waiting = np.concatenate([zero + 1, zero - 1, zero])
    used = np.concatenate([zero, blocks, -blocks])
    columns: dict[str, list[Any]] = {
        name: [] for name in ("time", "who", "running", "waiting", "used", "cached")
    }
    for index in np.unique(worker):
        own = np.flatnonzero(who == index)
        own = own[np.argsort(time[own], kind="stable")]
        active = np.minimum(np.cumsum(used[own]), 16_384)
        stored = np.cumsum(np.maximum(used[own], 0)) // 2
        columns["time"].append(time[own])
        columns["who"].append(who[own])
        columns["running"].append(np.cumsum(running[own]))
        columns["waiting"].append(np.cumsum(waiting[own]))
        columns["used"].append(active)
        columns["cached"].append(np.minimum(stored, 16_384 - active))
    joined = {
        name: np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)
        for name, parts in columns.items()
    }
    order = np.argsort(joined["time"], kind="stable")
    return {
        "sample_time_ns": joined["time"][order],
        "sample_worker": joined["who"][order],
        "sample_running": joined["running"][order],
        "sample_waiting": joined["waiting"][order],
        "sample_used_blocks": joined["used"][order],
        "sample_cached_blocks": joined["cached"][order],
    }
