"""Load against an endpoint: at arrival times, or from a number of users, with the results of each request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import ConfigError
from understudy.online.completions import MOST_THREADS, Completions, Endpoint, EndpointRun
from understudy.workload import Poisson, Workload
from understudy.workload.arrivals import arrival_times_ns
from understudy.workload.text import unique_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK = 16


def draw_requests(
    isl: int, osl: int, count: int, *, rate: float | None, least: float, seed: int, run: int = 0
) -> Workload:
    """Draw requests of random lengths, uniform from `least` times the given ones on, which share no prompt.

    `rate` is requests per second, as a Poisson process; None: without times. Prompts of different `run` differ.
    """
    draw = np.random.default_rng(seed)
    prompts, outputs = (
        draw.integers(max(int(longest * least), 1), longest + 1, size=count).astype(np.int64)
        for longest in (isl, osl)
    )
    offsets, ids = unique_ids(prompts, _BLOCK)
    blocks = -(-isl // _BLOCK) * count
    if (run + 1) * blocks >= 2**32:
        raise ConfigError("too many prompts for distinct content; give fewer rates, or fewer --num-prompts")
    times = np.zeros(count, np.int64) if rate is None else arrival_times_ns(Poisson(qps=rate), count, draw)
    return Workload(
        arrival_ns=times,
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        hash_offsets=offsets,
        hash_ids=ids + np.uint32(run * blocks),
        trace_block_size=_BLOCK,
        has_arrivals=rate is not None,
    )


def run_load(
    endpoint: Endpoint,
    workload: Workload,
    *,
    users: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> EndpointRun:
    """Send a workload in real time: at its arrival times, or `users` sessions at a time.

    A later turn follows its delay after the turn before it. Errors: ConfigError for a workload without times, or whose
    requests wait for one another.
    """
    if workload.graph is not None:
        raise ConfigError("the requests wait for one another; `understudy agents run` plays such a trace")
    if users is None and not workload.has_arrivals:
        raise ConfigError("the trace has no times; give --users, or --rate")
    return asyncio.run(_run(endpoint, workload.normalised(), users, progress))


async def _run(
    endpoint: Endpoint, workload: Workload, users: int | None, progress: Callable[[int], None] | None
) -> EndpointRun:
    heads = np.flatnonzero(workload.turn == 0).tolist()
    most = len(heads) if users is None else min(users, len(heads))
    with ThreadPoolExecutor(max(min(MOST_THREADS, most), 1)) as threads:
        client = Completions(endpoint, workload, threads, progress=progress)
        try:
            if users is None:
                due = workload.arrival_ns
                await asyncio.gather(*(_send_session(client, workload, row, int(due[row])) for row in heads))
            else:
                waiting = iter(heads)
                await asyncio.gather(*(_be_user(client, workload, waiting) for _ in range(most)))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            client.abort()
            raise
    return client.result()


async def _be_user(client: Completions, workload: Workload, waiting: Iterator[int]) -> None:
    """Send one session after another, as one user."""
    for row in waiting:
        await _send_session(client, workload, row, client.now_ns())


async def _send_session(client: Completions, workload: Workload, row: int, due_ns: int) -> None:
    while row >= 0:
        await client.send(row, due_ns)
        row = int(workload.next_turn[row])
        if row >= 0:
            due_ns = client.now_ns() + int(workload.delay_ns[row])
