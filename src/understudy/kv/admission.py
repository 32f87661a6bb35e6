"""Admission that waits: a queue of requests that wait for room."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.kv.freed import FreedBlocks
    from understudy.kv.request import RequestKv


class AdmissionQueue:
    """Requests that wait for room, first come first served; for one event loop."""

    def __init__(self, freed: FreedBlocks) -> None:
        self._line = asyncio.Lock()
        self._room = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admitted: weakref.WeakSet[RequestKv] = weakref.WeakSet()
        freed.subscribe(self._wake)

    @property
    def admitted(self) -> list[RequestKv]:
        """Requests that were admitted and are not closed."""
        return [kv for kv in self._admitted if kv.state != "closed"]

    async def admit(
        self, fits: Callable[[Iterable[RequestKv]], bool], make: Callable[[], RequestKv]
    ) -> RequestKv:
        """Wait for the requests before this one, then until it fits; return the request that `make` makes."""
        self._loop = asyncio.get_running_loop()
        async with self._line:
            while True:
                self._room.clear()  # before the check: room that is made after it wakes this one
                if fits(self.admitted):
                    break
                await self._room.wait()
            kv = make()
            self._admitted.add(kv)
            return kv

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._room.set)
