"""A connection: reads the requests of a client and hands them to the server; `Answer` sends."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING, Protocol

from understudy.http.bodies import LARGE_BODY_BYTES
from understudy.http.outbox import Answer
from understudy.http.parsing import MAX_HEADER_BYTES, MalformedMessage, RequestParser

if TYPE_CHECKING:
    from understudy.http.outbox import Outbox
    from understudy.http.request import Request

KEEP_ALIVE_S = 5.0
MAX_ARRIVAL_S = 60.0
"""Longest time for a request to arrive, seconds."""


class Handler(Protocol):
    """Answers requests, at once or later. Must not raise."""

    max_body_bytes: int
    max_body_depth: int

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer on the connection, now or later."""

    def malformed(self, status: int, why: str) -> bytes:
        """Build the body of the answer to a malformed request."""


class Connection(Answer, asyncio.Protocol):
    """One client. Requests are answered one after the other."""

    def __init__(self, handler: Handler, outbox: Outbox) -> None:
        super().__init__(outbox)
        self._handler = handler
        self._buffer = bytearray()
        """Received bytes that are not parsed yet."""
        self._parser = RequestParser(handler.max_body_bytes, handler.max_body_depth)
        self._malformed: MalformedMessage | None = None
        """Error behind the last complete request."""
        self._continued = False
        """True when `100 Continue` was sent for the incomplete request."""
        self._full = False
        """True while the client has unread answers; no further request is read until then."""
        self._idle: asyncio.TimerHandle | None = None
        self._idle_checks = 0

    # ── The transport's side ──

    def connection_made(
        self, transport: asyncio.BaseTransport, below: asyncio.Transport | None = None
    ) -> None:
        """Register the connection. `below`: transport of its encrypted bytes, with TLS."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._below = transport, below
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio sets it only on sockets that were made with a protocol number.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outbox.open.add(self)
        self._start_idle_timer()
        if self._has_more:  # the first bytes may come with the end of a TLS handshake
            self._read()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End the answer, because the client has disconnected."""
        self._transport = None
        self._outbox.open.discard(self)
        self._stop_idle_timer()
        self._parser.drop()
        if self._answering:
            self._close_answer()

    def eof_received(self) -> bool:
        """Close the connection when the client closes its side."""
        return False

    def data_received(self, data: bytes) -> None:
        """Buffer received bytes and read the requests in them."""
        self._buffer += data
        if not self._answering and not self._full:
            self._read()
        elif len(self._buffer) > MAX_HEADER_BYTES + self._handler.max_body_bytes:
            self.drop()  # more than any request, sent before the answer to the last one

    def pause_writing(self) -> None:
        """Stop reading requests while the client reads too slowly."""
        self._full = True

    def resume_writing(self) -> None:
        """Read requests again."""
        self._full = False
        if self._has_more and not self._answering:
            asyncio.get_running_loop().call_soon(self._read)

    # ── Requests ──

    @property
    def _has_more(self) -> bool:
        """True when received bytes or requests wait for the end of the answer."""
        return bool(self._buffer or self._parser.requests or self._malformed)

    def _read(self) -> None:
        while not self._answering and not self._full and not self.ends:
            request = self._next()
            if request is None:
                if self._malformed is not None:
                    self._refuse(self._malformed)
                return
            self._stop_idle_timer()
            self._answering = True
            self._keep_alive = request.head.keep_alive
            self._old = request.head.http_1_0
            self._chunked = not self._old
            self._bodyless = request.method == "HEAD"
            self._status = 0
            self.has_failed = False
            if len(request.body) > LARGE_BODY_BYTES:
                decoding = asyncio.get_running_loop().run_in_executor(None, request.decode)
                decoding.add_done_callback(partial(self._handle_decoded, request))
            else:
                self._handler.handle(request, self)

    def _refuse(self, error: MalformedMessage) -> None:
        self._answering = True
        self._keep_alive = self._bodyless = False
        self.respond(error.status, self._handler.malformed(error.status, str(error)))

    def _handle_decoded(self, request: Request, _: object) -> None:
        if self._transport is not None:
            self._handler.handle(request, self)

    def _next(self) -> Request | None:
        parser = self._parser
        if not parser.requests and self._buffer and self._malformed is None:
            data = bytes(self._buffer)
            self._buffer.clear()
            try:
                parser.feed(data)
            except MalformedMessage as error:
                self._malformed = error
        if parser.requests:
            self._continued = False
            return parser.requests.popleft()
        head = parser.head
        if head is not None and head.expects_more and not self._continued and self._malformed is None:
            self._continued = True
            if self._transport is not None:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    # ── Between requests ──

    def _read_on(self) -> None:
        self._start_idle_timer()
        if self._has_more:
            asyncio.get_running_loop().call_soon(self._read)

    def _start_idle_timer(self) -> None:
        self._stop_idle_timer()
        self._idle_checks = 0
        self._idle = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._close_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        if self._transport is not None and not self._answering:
            slow = bool(self._buffer) or self._parser.begun
            self._idle_checks += 1
            if slow and self._idle_checks * KEEP_ALIVE_S < MAX_ARRIVAL_S:
                self._idle = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._close_idle)
            else:
                self._transport.close()
