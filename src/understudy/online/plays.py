"""Plays on live workers: each request is sent when those that it waits for were sent or answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from understudy.workload.graph import COMPLETION, DISPATCH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from understudy.workload import RequestGraph, Workload

    Send = Callable[[int, int, Callable[[], None]], Awaitable[None]]


async def play_graph(
    workload: Workload, graph: RequestGraph, lanes: int, now_ns: Callable[[], int], send: Send
) -> None:
    """Run all plays: each from its own start, or, with `lanes`, at most so many at a time in row order.

    `send(row, due_ns, on_dispatch)` waits until a request is due, calls `on_dispatch`, and returns when it is answered.
    """
    order = np.argsort(graph.play, kind="stable")
    rows = np.split(order, np.flatnonzero(np.diff(graph.play[order])) + 1)
    if not lanes:
        starts = workload.arrival_ns[[int(part[0]) for part in rows]].tolist()
        await asyncio.gather(
            *(_Play(graph, part, start, now_ns, send).run() for part, start in zip(rows, starts, strict=True))
        )
        return
    waiting = iter(rows)

    async def lane() -> None:
        for part in waiting:
            await _Play(graph, part, max(now_ns(), 0), now_ns, send).run()  # no play begins before time 0

    await asyncio.gather(*(lane() for _ in range(min(lanes, len(rows)))))


class _Play:
    """One play: a task per request, and a future per event that others wait for."""

    def __init__(
        self, graph: RequestGraph, rows: np.ndarray, start_ns: int, now_ns: Callable[[], int], send: Send
    ) -> None:
        self._graph = graph
        self._rows = rows.tolist()
        self._start_ns = start_ns
        self._now_ns = now_ns
        self._send = send
        loop = asyncio.get_running_loop()
        self._events: list[dict[int, asyncio.Future[int]]] = [
            {row: loop.create_future() for row in self._rows} for _ in range(2)
        ]

    async def run(self) -> None:
        """Send all requests, and wait for their answers."""
        await asyncio.gather(*(self._request(row) for row in self._rows))

    async def _request(self, row: int) -> None:
        graph = self._graph
        due_ns = self._start_ns + int(graph.not_before_ns[row])
        for at in range(int(graph.dependency_offsets[row]), int(graph.dependency_offsets[row + 1])):
            event = self._events[graph.dependency_triggers[at]][int(graph.dependency_rows[at])]
            due_ns = max(due_ns, await asyncio.shield(event) + int(graph.dependency_delay_ns[at]))
        await self._send(row, due_ns, lambda: self._notify(DISPATCH, row))
        self._notify(COMPLETION, row)

    def _notify(self, trigger: int, row: int) -> None:
        self._events[trigger][row].set_result(self._now_ns())
