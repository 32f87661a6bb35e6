"""Requests that go to another engine because one has failed before the first byte of its answer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.proxy.workers import ProxyWorker, Workers
    from understudy.server.api.errors import ApiError


class EngineFailed(Exception):
    """An engine failed a request of which the client has received nothing."""

    def __init__(self, worker: ProxyWorker, answer: ApiError) -> None:
        """Keep the engine, and the answer for the client if no other engine takes the request."""
        super().__init__(str(answer))
        self.worker = worker
        self.answer = answer


def has_others(workers: Workers, failed: list[ProxyWorker]) -> bool:
    """Return whether an engine is up that has not failed this request."""
    return any(worker.up and worker not in failed for worker in workers.all)


@contextmanager
def keep_from(workers: Workers, failed: list[ProxyWorker]) -> Iterator[None]:
    """Keep a choice from engines that have failed this request."""
    numbers = [rank.number for worker in failed if worker.up for rank in worker.ranks]
    for number in numbers:
        workers.dispatcher.set_available(number, False)
    try:
        yield
    finally:
        for number in numbers:
            workers.dispatcher.set_available(number, True)
