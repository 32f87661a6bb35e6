"""Parse HTTP/1.1 with llhttp in its strict mode; refuse what llhttp accepts and two readers could read differently."""

from __future__ import annotations

from collections import deque
from urllib.parse import unquote

import httptools

from understudy.http.head import Head
from understudy.http.request import Request

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_HEADERS = 256
_LONG_LINE_BYTES = 64 * 1024
_ONCE = ("content-length", "transfer-encoding", "host")


class MalformedMessage(Exception):
    """Invalid HTTP/1.1; the connection must close. `status`: of the answer to the client."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class MessageParser:
    """Collects the header fields of messages, and limits their size. Subclasses receive llhttp's callbacks."""

    name = "message"
    status = 400
    """Status of the answer to a client when a message is malformed."""

    def __init__(self, max_head_bytes: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._llhttp: httptools.HttpRequestParser | httptools.HttpResponseParser
        self._begin()

    def _begin(self, *, in_head: bool = False) -> None:
        self._fields: list[tuple[str, str]] = []
        self._head_bytes = self._line_bytes = self._trailers = 0
        self._in_head = in_head
        self._same_head = False
        """True while the bytes of one call to `feed` belong to one head."""
        self._held = bytearray()
        """Part of a long header line: llhttp's binding copies the line for each part that it receives."""

    def feed(self, data: bytes) -> None:
        """Parse further bytes. MalformedMessage when they are invalid."""
        if self._in_head and self._line_bytes > _LONG_LINE_BYTES:
            self._held += data
            if b"\n" not in data and len(self._held) < _LONG_LINE_BYTES:
                return
            data = bytes(self._held)
            self._held.clear()
        self._same_head = self._in_head
        rest = None
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise MalformedMessage(self.status, f"{self.name}: {error}; send plain HTTP/1.1") from None
        if rest is not None:
            self._ignore_upgrade(rest)
        elif self._same_head and self._in_head:
            end = data.rfind(b"\n")
            self._line_bytes = self._line_bytes + len(data) if end < 0 else len(data) - end - 1
            self._limit_head(self._line_bytes)

    def drop(self) -> None:
        """Release the memory of an incomplete message."""
        self._begin()

    def _limit_head(self, more: int = 0) -> None:
        if self._head_bytes + more > self._max_head_bytes:
            raise MalformedMessage(
                431 if self.status == 400 else self.status,
                f"{self.name}: headers larger than {self._max_head_bytes} bytes; send fewer",
            )

    def _ignore_upgrade(self, rest: bytes) -> None:  # noqa: ARG002
        raise MalformedMessage(self.status, f"{self.name}: switches protocols unasked; send plain HTTP/1.1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field; count a trailer, and drop it."""
        if self._in_head:
            self._head_bytes += len(name) + len(value) + 4
            self._limit_head()
            self._fields.append((name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")))
        else:
            self._trailers += 1
        if len(self._fields) > MAX_HEADERS or self._trailers > MAX_HEADERS:
            raise MalformedMessage(
                431 if self.status == 400 else self.status,
                f"{self.name}: more than {MAX_HEADERS} headers; send fewer",
            )

    def _headers(self) -> dict[str, str]:
        """Map names to values; repeated values are joined by commas."""
        headers: dict[str, str] = {}
        for name, value in self._fields:
            if name in headers:
                if name in _ONCE:
                    raise MalformedMessage(self.status, f"{name}: given twice; give it once")
                value = f"{headers[name]}, {value}"
            headers[name] = value
        return headers

    def _length(self, headers: dict[str, str]) -> int | None:
        """Return the length of the body: −1 if chunked, None if no header gives it."""
        encoding = headers.get("transfer-encoding")
        if encoding is not None:
            if encoding.lower() != "chunked":
                raise MalformedMessage(self.status, "transfer-encoding: not understood; use chunked alone")
            return -1
        text = headers.get("content-length")
        return None if text is None else int(text)


class RequestParser(MessageParser):
    """Turns received bytes into requests."""

    name = "request"

    def __init__(self, max_body_bytes: int, max_body_depth: int) -> None:
        self._llhttp = self._requests_llhttp = httptools.HttpRequestParser(self)
        self._max_body_bytes = max_body_bytes
        self._max_body_depth = max_body_depth
        self._ignores_upgrade = False
        self.requests: deque[Request] = deque()
        """Complete requests."""
        self.begun = False
        """True while a request is incomplete."""
        self.head: Head | None = None
        """Head of the incomplete request; None before it is complete."""
        super().__init__(MAX_HEADER_BYTES)

    def _begin(self, *, in_head: bool = False) -> None:
        super()._begin(in_head=in_head)
        self._target = b""
        self._body = bytearray()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read on in HTTP/1.1 after a request that asks for another protocol; llhttp skips its body."""
        assert self.head is not None
        length = self.head.length
        size = b"transfer-encoding: chunked" if length < 0 else b"content-length: %d" % length
        self._llhttp = self._requests_llhttp = httptools.HttpRequestParser(self)
        self._llhttp.feed_data(b"POST / HTTP/1.1\r\n" + size + b"\r\n\r\n")
        if rest:
            self.feed(rest)

    # ── llhttp's callbacks ──

    def on_message_begin(self) -> None:
        """Begin a request."""
        if not self._ignores_upgrade:
            self._begin(in_head=True)
            self.begun = True

    def on_url(self, part: bytes) -> None:
        """Collect the target."""
        self._target += part

    def on_headers_complete(self) -> None:
        """Check the head."""
        if self._ignores_upgrade:
            self._ignores_upgrade = False
            return
        self._in_head = False
        self._limit_head(len(self._target))
        self.head = self._read_head()
        if self.head.length > self._max_body_bytes:
            raise self._too_large()
        self._ignores_upgrade = self._llhttp.should_upgrade()

    def on_body(self, part: bytes) -> None:
        """Collect the body."""
        if len(self._body) + len(part) > self._max_body_bytes:
            raise self._too_large()
        self._body += part

    def on_message_complete(self) -> None:
        """Queue the request."""
        if self._ignores_upgrade:
            return
        assert self.head is not None
        self.requests.append(Request(self.head, bytes(self._body), self._max_body_depth))
        self.begun, self.head = False, None
        self._begin()

    def _too_large(self) -> MalformedMessage:
        why = (
            f"body: larger than {self._max_body_bytes} bytes; send less, or raise --max-request-body-size-mb"
        )
        return MalformedMessage(413, why)

    def _read_head(self) -> Head:
        llhttp = self._requests_llhttp
        version = llhttp.get_http_version()
        if version not in ("1.1", "1.0"):
            raise MalformedMessage(400, f"request: HTTP/{version} is not supported; send HTTP/1.1")
        headers = self._headers()
        old = version == "1.0"
        if not old and "host" not in headers:
            raise MalformedMessage(400, "host: missing; HTTP/1.1 needs it")
        if old and "transfer-encoding" in headers:
            raise MalformedMessage(400, "transfer-encoding: not part of HTTP/1.0; give a content-length")
        path, mark, query = self._target.decode("ascii").partition("?")
        if not path.startswith("/") and path != "*":
            scheme, separator, rest = path.partition("://")
            if not separator or scheme.lower() not in ("http", "https"):
                raise MalformedMessage(400, "request: the target is malformed; give a path or an http URL")
            path = "/" + rest.partition("/")[2]
        return Head(
            llhttp.get_method().decode("ascii"),
            unquote(path),
            query,
            headers,
            llhttp.should_keep_alive(),
            old,
            self._length(headers) or 0,
            f"{path}{mark}{query}",
        )
