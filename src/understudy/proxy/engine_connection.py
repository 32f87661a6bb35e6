"""A connection to an engine, reused only while no byte on it can belong to an earlier answer."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING, NamedTuple

from understudy.http.parsing import MalformedMessage
from understudy.proxy.answers import AnswerHead, AnswerParser

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_IDLE_S = 3.0
"""vLLM closes a connection that idles for 5 s; closing earlier avoids sending a request into that."""
_MAX_UNREAD_BYTES = 256 * 1024


class UpstreamError(Exception):
    """The engine cannot be reached, sends invalid HTTP, or sends nothing. `status`: of the client's answer."""

    status = 502
    kind = "Bad Gateway"


class Unreachable(UpstreamError):
    """No connection could be made, so the engine has not read the request."""


class OutOfFiles(UpstreamError):
    """This process has no file free for a connection, which says nothing about the engine."""

    status = 503
    kind = "Service Unavailable"


class EngineStalled(UpstreamError):
    """The engine sent nothing within a time limit."""

    status = 504
    kind = "Gateway Timeout"


class TimeLimits(NamedTuple):
    """Time limits for an engine, in seconds; 0: without limit."""

    first_byte_s: float
    """From sending a request to the first byte of the answer's body: the queue and the prefill, or, without a
    stream, the whole generation."""
    stall_s: float
    """Without a byte in the middle of an answer."""


NO_LIMITS = TimeLimits(0.0, 0.0)


class EngineConnection(asyncio.Protocol):
    """Reads one answer after the other. UpstreamError from reads when the engine closes or stalls."""

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._answer = AnswerParser()
        self._malformed: MalformedMessage | None = None
        self._ended = False
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._first_byte_by: float | None = None
        """Loop time; None once the body has begun."""
        self._on_leave: Callable[[EngineConnection], None] | None = None
        """Called when an idle connection leaves the pool; None while in use."""
        self._expiry: asyncio.TimerHandle | None = None

    # ── The transport's side ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Parse what the engine sends; close when it was not asked for anything."""
        if self._on_leave is not None:
            self.close()
            return
        if self._answer.complete:
            self._answer.surplus = True
        elif self._malformed is None:
            try:
                self._answer.feed(data)
            except MalformedMessage as error:
                self._malformed = error
        if len(self._answer.body) > _MAX_UNREAD_BYTES and self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Record the end of input, and let the transport close."""
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Fail a read that waits, and leave the pool."""
        self._transport, self._ended = None, True
        self._wake()
        self._leave_pool()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ── One exchange ──

    def send(self, data: bytes) -> None:
        """Write a request; the limit for the first byte of its answer starts here."""
        assert self._transport is not None
        limit_s = self._limits.first_byte_s
        self._first_byte_by = asyncio.get_running_loop().time() + limit_s if limit_s else None
        self._answer = AnswerParser()
        self._transport.write(data)

    async def read_head(self) -> AnswerHead:
        """Wait for the head of the answer. MalformedMessage when it is invalid."""
        while self._answer.head is None:
            await self._more()
        return self._answer.head

    async def read_body(self) -> bytes:
        """Read what has come of the body; nothing at its end."""
        answer = self._answer
        while not answer.body:
            if answer.complete or (self._ended and answer.head is not None and answer.head.length is None):
                return b""
            await self._more()
        self._first_byte_by = None
        taken = bytes(answer.body)
        answer.body.clear()
        return taken

    async def _more(self) -> None:
        if self._malformed is not None:
            raise self._malformed
        if self._ended:
            raise UpstreamError("the connection was closed")
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None
        if self._first_byte_by is not None:
            why = f"did not begin its answer within {self._limits.first_byte_s:g} s (--first-byte-timeout-s)"
            timer = loop.call_at(self._first_byte_by, _expire, waiter, why)
        elif self._limits.stall_s:
            why = (
                f"sent nothing for {self._limits.stall_s:g} s in the middle of its answer (--stall-timeout-s)"
            )
            timer = loop.call_later(self._limits.stall_s, _expire, waiter, why)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    # ── Between requests ──

    def become_idle(self, on_leave: Callable[[EngineConnection], None]) -> bool:
        """Become idle. False, and closed, when bytes are surplus or unsent, or the engine has closed."""
        transport, answer = self._transport, self._answer
        clean = answer.complete and not answer.surplus and self._malformed is None
        if transport is None or self._ended or not clean or transport.get_write_buffer_size():
            self.close()
            return False
        self._on_leave = on_leave
        self._expiry = asyncio.get_running_loop().call_later(MAX_IDLE_S, self.close)
        return True

    def take(self) -> bool:
        """Leave the pool for a request. False, and closed, if the engine sent a byte or closed meanwhile."""
        self._leave_pool()
        transport = self._transport
        if transport is None or transport.is_closing() or _is_readable(transport):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close at once; unsent bytes are dropped."""
        self._leave_pool()
        if self._transport is not None:
            self._transport.abort()

    def _leave_pool(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave(self)


def _is_readable(transport: asyncio.Transport) -> bool:
    """Whether the socket has bytes, or an end, that the loop has not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _expire(waiter: asyncio.Future[None], why: str) -> None:
    if not waiter.done():
        waiter.set_exception(EngineStalled(why))
