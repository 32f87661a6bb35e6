"""Reads requests from bytes. Strict where two readers could disagree about where a request ends."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_HEADERS = 256
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x20\x7f]")
_TOKEN_BYTES = frozenset(byte for byte in range(256) if _TOKEN.fullmatch(bytes([byte])))
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,15}(?:[ \t]*;[^\r\n]*)?")


class BadRequest(Exception):
    """These bytes are no request; the connection cannot go on."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Head(NamedTuple):
    """A request up to its body."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    keep_alive: bool
    http_1_0: bool
    length: int
    """Of the body; −1: it comes in chunks."""
    target: str
    """Path and query as they came, escapes and all: what is passed on to others."""

    @property
    def expects_more(self) -> bool:
        """The client waits with the body until it is told to go on. One of HTTP/1.0 knows nothing of that."""
        return not self.http_1_0 and self.headers.get("expect", "").lower() == "100-continue"


def check_beginning(data: bytearray, known: int = 0) -> None:
    """BadRequest when these bytes cannot become a request: of another protocol, or lines that end otherwise.

    The first `known` of them were looked at before.
    """
    if (
        data and data[0] not in _TOKEN_BYTES and data != b"\r"
    ):  # half of an empty line, of which some send one
        raise BadRequest(400, "this is no HTTP; a client that encrypts needs a server that does")
    if data.find(b"\n\n", max(known - 1, 0)) >= 0:
        raise BadRequest(400, "lines must end with CR LF")


def parse_head(data: bytes) -> Head:
    """The request line and headers, without the empty line. BadRequest when they are none."""
    lines = data.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]):
        raise BadRequest(400, "the request line is malformed")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest(400, "this server speaks HTTP/1.1")
    if len(lines) - 1 > MAX_HEADERS:
        raise BadRequest(431, f"more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, value = _named(line)
        key = name.decode("ascii").lower()
        text = value.strip(b" \t").decode("latin-1")
        if key in ("content-length", "transfer-encoding", "host") and key in headers and headers[key] != text:
            raise BadRequest(400, f"{key} is given twice")
        headers[key] = text if key not in headers else f"{headers[key]}, {text}"
    if _CONTROL.search(target):
        raise BadRequest(400, "the target has a control character in it")
    path, mark, query = target.decode("latin-1").partition("?")
    if not path.startswith("/") and path != "*":
        scheme, separator, rest = path.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise BadRequest(400, "the target is malformed")
        path = "/" + rest.partition("/")[2]
    connection = headers.get("connection", "").lower()
    old = version == b"HTTP/1.0"
    keep_alive = "close" not in connection and (not old or "keep-alive" in connection)
    return Head(
        method.decode("ascii"),
        unquote(path),
        query,
        headers,
        keep_alive,
        old,
        _length(headers),
        f"{path}{mark}{query}",
    )


def _named(line: bytes) -> tuple[bytes, bytes]:
    """Name and value of a header."""
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name) or b"\x00" in value or b"\n" in value or b"\r" in value:
        raise BadRequest(400, "a header is malformed")
    return name, value


def _length(headers: dict[str, str]) -> int:
    encoding = headers.get("transfer-encoding")
    if encoding is not None:
        if encoding.lower() != "chunked" or "content-length" in headers:
            raise BadRequest(400, "transfer-encoding must be chunked, without a content-length")
        return -1
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise BadRequest(400, "content-length is not a number")
    return int(text)


class ChunkedBody:
    """Takes a chunked body out of a buffer, piece by piece."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = self._trailers = 0
        self._left = -1  # of the chunk at hand; −1: its size comes next; −2: trailers come next

    def feed(self, buffer: bytearray) -> bytes | None:
        """The whole body once it is complete, taken from the front of the buffer; None before."""
        while True:
            if self._left >= 0:
                if len(buffer) < self._left + 2:
                    return None
                if buffer[self._left : self._left + 2] != b"\r\n":
                    raise BadRequest(400, "a chunk does not end where it said")
                self._parts.append(bytes(buffer[: self._left]))
                del buffer[: self._left + 2]
                self._left = -1
            end = buffer.find(b"\r\n")
            if end < 0:
                if len(buffer) > 4096:
                    raise BadRequest(400, "a chunk has no size")
                return None
            line = bytes(buffer[:end])
            del buffer[: end + 2]
            if self._left == -2:
                if not line:
                    return b"".join(self._parts)
                _named(line)  # nobody reads it, but a request that were taken for one would be lost
                self._trailers += 1
                if self._trailers > MAX_HEADERS:
                    raise BadRequest(431, f"more than {MAX_HEADERS} headers behind the body")
                continue
            if not _CHUNK.fullmatch(line):
                raise BadRequest(400, "the size of a chunk is malformed")
            size = int(line.partition(b";")[0], 16)
            self._size += size
            if self._size > self._limit:
                raise BadRequest(413, f"the body is larger than {self._limit} bytes")
            self._left = size if size else -2
