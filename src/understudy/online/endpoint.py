"""Plays against any OpenAI-compatible endpoint: a client that sends each request when its answers are there."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.online.completions import MOST_THREADS, Completions, Endpoint, EndpointRun
from understudy.online.hints import SessionTeller
from understudy.online.plays import play_graph
from understudy.workload import Plays

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.workload import Workload


def run_against(
    url: str,
    workload: Workload,
    *,
    model: str,
    load: Plays | None = None,
    vocabulary: int = 32_000,
    timeout_s: float = 3600.0,
    progress: Callable[[int], None] | None = None,
) -> EndpointRun:
    """Play a workload with a graph against `url`, in real time; prompts are token ids below `vocabulary`.

    Lengths are exact: `max_tokens` with `ignore_eos`; a request without output asks for one token. Errors: ConfigError
    for a URL or a workload that does not fit.
    """
    load = Plays() if load is None else load
    if workload.graph is None:
        raise ConfigError(
            "the requests do not wait for one another; `understudy load` sends such a trace, `understudy agents run` "
            "needs one of agents"
        )
    if not load.lanes and not workload.has_arrivals:
        raise ConfigError("the workload has no timestamps; run it in lanes (--lanes N)")
    endpoint = Endpoint(url=url, model=model, vocabulary=vocabulary, timeout_s=timeout_s)
    if load.clock == "client":
        workload = replace(workload, graph=workload.graph.without_floors())
    workload = workload.normalised().scale_arrival_rate(load.arrival_rate_scale)
    return asyncio.run(_play(endpoint, workload, load.lanes, progress))


async def _play(
    endpoint: Endpoint, workload: Workload, lanes: int, progress: Callable[[int], None] | None
) -> EndpointRun:
    """Run all plays to their end."""
    graph = workload.graph
    assert graph is not None
    with ThreadPoolExecutor(min(MOST_THREADS, max(len(workload), 1))) as threads:
        client = Completions(endpoint, workload, threads, teller=SessionTeller(workload), progress=progress)
        await play_graph(workload, graph, lanes, client.now_ns, client.send)
    return client.result()
