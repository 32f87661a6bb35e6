"""Sends answers: whole, or as streams with one write per step, whose lateness it measures."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from understudy.http.heads import BODYLESS, date_lines, status_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.clock import Clock
    from understudy.lateness import Lateness

MAX_SEND_S = 1.0
"""Time that a client has to read the end of its answer when the server stops."""
MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""Most unsent bytes of a slow client; with more its connection is closed."""

_HEX = [f"{size:x}\r\n".encode() for size in range(4096)]


class Late(Protocol):
    """Receives the lateness of its delivered tokens."""

    max_lateness_s: float


class Outbox:
    """Connections with queued output; each gets one write after a step."""

    def __init__(self, clock: Clock, lateness: Lateness) -> None:
        self._clock = clock
        self._lateness = lateness
        self.dirty: list[Answer] = []
        self.open: set[Answer] = set()
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
        handshakes = tuple(self.handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
        self.handshakes.difference_update(handshakes)
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


class Answer:
    """The sending half of a connection: one answer at a time."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._transport: asyncio.Transport | None = None
        self._below: asyncio.Transport | None = None
        """Transport of the encrypted bytes, with TLS."""
        self._answering = False
        self._keep_alive = True
        self._old = False
        self._chunked = True
        self._bodyless = False
        self._streaming = False
        self._streams_events = False
        self._parts: list[bytes] = []
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
        self.has_failed = False
        """True when the answer is a stream that has ended with an error."""
        self.extra_headers = b""
        self.error_form: Callable[[Any], bytes] | None = None
        """Formats errors of the server that answers; None: in vLLM's form."""
        self.slow_s = 0.0
        """Injected delay of everything sent for this answer, seconds."""
        self._slow_until_s = 0.0
        self._status = 0
        self._sent_bytes = 0

    @property
    def peer(self) -> str | None:
        """The client's address; "" on a Unix socket, None when the client has disconnected."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        if name is None:
            return None
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def status(self) -> int:
        """Status of the answer; 0 before it begins."""
        return self._status

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
            self.has_failed = True
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
        self._read_on()

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

    def _read_on(self) -> None:
        """Read the next request, because the answer has ended."""
        raise NotImplementedError
