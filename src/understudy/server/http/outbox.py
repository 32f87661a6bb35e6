"""Sends the output of a step, one write per connection, and measures its lateness."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from understudy.server.clock import Clock
    from understudy.server.http.connection import Connection
    from understudy.server.lateness import Lateness

MAX_SEND_S = 1.0
"""Time that a client has to read the end of its answer when the server stops."""


class Late(Protocol):
    """Receives the lateness of its delivered tokens."""

    max_lateness_s: float


class Outbox:
    """Connections with queued output; each gets one write after a step."""

    def __init__(self, clock: Clock, lateness: Lateness) -> None:
        self._clock = clock
        self._lateness = lateness
        self.dirty: list[Connection] = []
        self.open: set[Connection] = set()
        """All open connections."""
        self.handshakes: set[asyncio.Task[None]] = set()
        """TLS handshakes of clients that have just connected."""

    @property
    def sending(self) -> bool:
        """True while a connection has unsent bytes."""
        return any(connection.unsent_bytes for connection in self.open)

    def end_all(self, status: int, body: bytes) -> None:
        """End the answers of all connections with an error."""
        for connection in tuple(self.open):
            connection.end_early(status, body)

    async def wait_until_sent(self) -> None:
        """Wait until all output is sent, for at most `MAX_SEND_S`."""
        for handshake in tuple(self.handshakes):
            handshake.cancel()
        until_s = time.monotonic() + MAX_SEND_S
        while self.sending and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # so that connections are closed when this returns

    def flush(self) -> None:
        """Send queued output and record the lateness of its tokens."""
        if not self.dirty:
            return
        dirty, self.dirty = self.dirty, []
        clock = self._clock
        for connection in dirty:
            connection.flush()
            if connection.due_tokens:
                late_s = (clock.now_ns() - connection.due_ns) / clock.speed / 1e9
                self._lateness.record(late_s, connection.due_tokens)
                connection.due_tokens = 0
                whose = connection.due_of
                if whose is not None and late_s > whose.max_lateness_s:
                    whose.max_lateness_s = late_s
