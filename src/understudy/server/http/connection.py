"""A connection: requests in, responses and streams out."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING

from understudy.server.http.bodies import LARGE_BODY_BYTES
from understudy.server.http.heads import BODYLESS, date_lines, status_line
from understudy.server.http.parsing import MAX_HEADER_BYTES, MalformedMessage, RequestParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.http.outbox import Late, Outbox
    from understudy.server.http.request import Handler, Request

KEEP_ALIVE_S = 5.0
MAX_ARRIVAL_S = 60.0
"""Longest time for a request to arrive, seconds."""
MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""Most unsent bytes of a slow client; with more its connection is closed."""

_HEX = [f"{size:x}\r\n".encode() for size in range(4096)]


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other."""

    def __init__(self, handler: Handler, outbox: Outbox) -> None:
        self._handler = handler
        self._outbox = outbox
        self._transport: asyncio.Transport | None = None
        self._below: asyncio.Transport | None = None
        """Transport of the encrypted bytes, with TLS."""
        self._buffer = bytearray()
        """Received bytes that are not parsed yet."""
        self._parser = RequestParser(handler.max_body_bytes, handler.max_body_depth)
        self._malformed: MalformedMessage | None = None
        """Error behind the last complete request."""
        self._continued = False
        """True when `100 Continue` was sent for the incomplete request."""
        self._full = False
        """True while the client has unread answers; no further request is read until then."""
        self._answering = False
        self._keep_alive = True
        self._old = False
        self._chunked = True
        self._bodyless = False
        self._streaming = False
        self._streams_events = False
        self._parts: list[bytes] = []
        self._idle: asyncio.TimerHandle | None = None
        self._idle_checks = 0
        self.due_ns = 0
        self.due_tokens = 0
        self.due_of: Late | None = None
        """Worker whose lateness the due tokens count for."""
        self.on_close: Callable[[], None] | None = None
        """Called once if the client disconnects before the answer has ended."""
        self.on_answered: Callable[[int, int], None] | None = None
        """Called with the status and the size of an answer that has ended."""
        self.on_first_token: Callable[[], None] | None = None
        """Called once at the first token of the answer."""
        self.on_ended: Callable[[], None] | None = None
        """Called once when the answer has ended or the client has disconnected, after the other callbacks."""
        self.extra_headers = b""
        self.slow_s = 0.0
        """Injected delay of everything sent for this answer, seconds."""
        self._slow_until_s = 0.0
        self._status = 0
        self._sent_bytes = 0

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

    # ── Answers ──

    @property
    def peer(self) -> str | None:
        """The client's address; "" on a Unix socket, None when the client has disconnected."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        if name is None:
            return None
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def ends(self) -> bool:
        """True when no more requests are read."""
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the system has not taken; at least 1 while an injected delay holds some."""
        transport = self._transport
        if transport is None:
            return 0
        below = 0 if self._below is None else self._below.get_write_buffer_size()
        return transport.get_write_buffer_size() + below + (1 if self._answering and self.slow_s else 0)

    @property
    def closed(self) -> bool:
        """True when the client has disconnected."""
        return self._transport is None

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: bytes = b"",
        *,
        length: int | None = None,
    ) -> None:
        """Send a whole answer. `headers`: further lines with CRLF; `length`: of a body that is not sent."""
        if self._transport is None:
            return
        kind = f"content-type: {content_type}\r\n".encode() if content_type else b""
        if status in BODYLESS:  # a client would take a body for the next answer
            body = b""
        size = len(body) if length is None else length
        self._write(
            b"".join(
                (
                    status_line(status),
                    date_lines(),
                    b"" if status in BODYLESS else b"content-length: %d\r\n" % size,
                    kind,
                    headers,
                    self.extra_headers,
                    self._connection_line(),
                    b"\r\n",
                    b"" if self._bodyless else body,  # a HEAD request gets no body
                )
            )
        )
        self._status = status
        self._sent_bytes = 0 if self._bodyless else len(body)
        self._end()

    def start_stream(
        self,
        headers: bytes = b"",
        *,
        status: int = 200,
        content_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        """Send the head of a stream."""
        self._status = status
        self._sent_bytes = 0
        self._streaming = True
        self._streams_events = content_type.startswith("text/event-stream")
        if not self._chunked:
            self._keep_alive = False
        head = (
            status_line(status),
            date_lines(),
            f"content-type: {content_type}\r\n".encode("latin-1") if content_type else b"",
            headers,
            self.extra_headers,
            b"transfer-encoding: chunked\r\n" if self._chunked else b"",
            self._connection_line(),
            b"\r\n",
        )
        if self._transport is not None:
            self._write(b"".join(head))

    def _connection_line(self) -> bytes:
        """Build the Connection header, where it differs from the default of the HTTP version."""
        if self._keep_alive:
            return b"connection: keep-alive\r\n" if self._old else b""
        return b"connection: close\r\n"

    def send_event(self, data: bytes) -> None:
        """Queue an event for the next flush. Empty data is dropped, because an empty chunk ends a stream."""
        if not data:
            return
        if not self._parts:
            self._outbox.dirty.append(self)
        self._parts.append(data)

    def end_stream(self) -> None:
        """Send the remaining events and end the stream."""
        self._streaming = False
        self.flush()
        if self._transport is not None:
            if self._chunked:
                self._write(b"0\r\n\r\n")
            self._end()

    def flush(self) -> None:
        """Send the queued events in one write."""
        if not self._parts:
            return
        data = b"".join(self._parts)
        self._parts.clear()
        self._sent_bytes += len(data)
        transport = self._transport
        if transport is None:
            return
        if self._chunked:
            size = len(data)
            data = b"".join((_HEX[size] if size < 4096 else b"%x\r\n" % size, data, b"\r\n"))
        self._write(data)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()

    def end_early(self, status: int, body: bytes) -> None:
        """Answer with an error, or end an event stream with it and `[DONE]`; then close the connection."""
        self._keep_alive = False
        if not self._answering:
            return
        if not self._status:
            self.on_close = None
            self.respond(status, body)
        elif self._streaming and self._streams_events:
            self.send_event(b"data: " + body + b"\n\ndata: [DONE]\n\n")
            self.end_stream()
        elif self._streaming:
            self.drop()

    def drop(self) -> None:
        """Abort the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self.slow_s:
            self._call_delayed(self._transport.write, data)
        else:
            self._transport.write(data)

    def _end(self) -> None:
        if self.slow_s:
            self._call_delayed(self._finish_delayed)
        else:
            self._finish()

    def _call_delayed(self, act: Callable[..., object], *args: object) -> None:
        """Call `act` after the injected delay, in order with earlier calls."""
        loop = asyncio.get_running_loop()
        self._slow_until_s = max(self._slow_until_s + 1e-6, loop.time() + self.slow_s)
        loop.call_at(self._slow_until_s, act, *args)

    def _finish_delayed(self) -> None:
        if self._answering:  # else the client has disconnected
            self._finish()

    def _finish(self) -> None:
        self.slow_s = 0.0
        self._answering = False
        self.on_close = None
        self._notify_ended()
        if self._transport is None:
            return
        if not self._keep_alive:
            self._transport.close()
            return
        self._start_idle_timer()
        if self._has_more:
            asyncio.get_running_loop().call_soon(self._read)

    def _close_answer(self) -> None:
        self.slow_s = 0.0
        self._answering = False
        self._parts.clear()
        on_close, self.on_close = self.on_close, None
        self._notify_ended()
        if on_close is not None:
            on_close()

    def _notify_ended(self) -> None:
        on_answered, self.on_answered = self.on_answered, None
        if on_answered is not None:
            on_answered(self._status, self._sent_bytes)
        self.on_first_token = None
        on_ended, self.on_ended = self.on_ended, None
        if on_ended is not None:
            on_ended()

    def notify_first_token(self) -> None:
        """Call `on_first_token`, once."""
        on_first_token, self.on_first_token = self.on_first_token, None
        if on_first_token is not None:
            on_first_token()

    # ── Between requests ──

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
