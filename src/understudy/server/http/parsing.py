"""Parse the heads and chunks of HTTP/1.1. Strict where two readers could disagree about where a message ends."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_HEADERS = 256
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x20\x7f]")
_TOKEN_BYTES = frozenset(byte for byte in range(256) if _TOKEN.fullmatch(bytes([byte])))
_IN_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_VALUE = re.compile(_IN_VALUE)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;" + _IN_VALUE + rb")?")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: " + _IN_VALUE + rb")?")
_ONCE = ("content-length", "transfer-encoding", "host")


class BadRequest(Exception):
    """Invalid HTTP/1.1; the connection must close. `status`: of the answer to the client."""

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
    """Length of the body; −1: chunked."""
    target: str
    """Path and query as received, with escapes, for forwarding."""

    @property
    def expects_more(self) -> bool:
        """True when the client waits for `100 Continue` before the body; HTTP/1.0 does not have it."""
        return not self.http_1_0 and self.headers.get("expect", "").lower() == "100-continue"


def check_beginning(data: bytearray, known: int = 0) -> None:
    """Raise BadRequest when bytes cannot become a request: another protocol, or other line ends.

    The first `known` bytes were checked before.
    """
    if (
        data and data[0] not in _TOKEN_BYTES and data != b"\r"
    ):  # half of an empty line, of which some send one
        raise BadRequest(400, "this is no HTTP; a client that encrypts needs a server that does")
    if data.find(b"\n\n", max(known - 1, 0)) >= 0:
        raise BadRequest(400, "lines must end with CR LF")


def parse_head(data: bytes) -> Head:
    """Parse request line and headers, without the empty line. BadRequest when they are invalid."""
    lines = data.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]):
        raise BadRequest(400, "the request line is malformed")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest(400, "this server speaks HTTP/1.1")
    headers = _by_name(_fields(lines[1:]))
    old = version == b"HTTP/1.0"
    if not old and "host" not in headers:
        raise BadRequest(400, "host: missing; HTTP/1.1 needs it")
    if old and "transfer-encoding" in headers:
        raise BadRequest(400, "transfer-encoding: not part of HTTP/1.0; give a content-length")
    if _CONTROL.search(target):
        raise BadRequest(400, "the target has a control character in it")
    path, mark, query = target.decode("latin-1").partition("?")
    if not path.startswith("/") and path != "*":
        scheme, separator, rest = path.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise BadRequest(400, "the target is malformed")
        path = "/" + rest.partition("/")[2]
    return Head(
        method.decode("ascii"),
        unquote(path),
        query,
        headers,
        _keep_alive(headers, old),
        old,
        _length(headers) or 0,
        f"{path}{mark}{query}",
    )


class AnswerHead(NamedTuple):
    """An engine's answer up to its body."""

    status: int
    fields: list[tuple[str, str]]
    """Names (in lower case) and values, in order."""
    headers: dict[str, str]
    keep_alive: bool
    length: int | None
    """Bytes of the body; −1: chunked; None: it ends with the connection."""


def parse_answer_head(data: bytes) -> AnswerHead:
    """Parse a status line and headers, without the empty line. BadRequest when they are invalid."""
    lines = data.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise BadRequest(502, f"no answer begins with {lines[0][:40]!r}")
    fields = _fields(lines[1:])
    headers = _by_name(fields)
    old = match[1] == b"0"
    length = _length(headers)
    # HTTP/1.0 has no chunks: what follows such a body cannot be trusted.
    keep_alive = _keep_alive(headers, old) and not (old and length == -1)
    return AnswerHead(int(match[2]), fields, headers, keep_alive, length)


def _keep_alive(headers: dict[str, str], old: bool) -> bool:
    connection = headers.get("connection", "").lower()
    return "close" not in connection and (not old or "keep-alive" in connection)


def _fields(lines: list[bytes]) -> list[tuple[str, str]]:
    if len(lines) > MAX_HEADERS:
        raise BadRequest(431, f"more than {MAX_HEADERS} headers")
    return [parse_field(line) for line in lines]


def parse_field(line: bytes) -> tuple[str, str]:
    """Split a header line into its name (in lower case) and value. BadRequest when it is invalid."""
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise BadRequest(400, "a header is malformed")
    return name.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")


def _by_name(fields: list[tuple[str, str]]) -> dict[str, str]:
    """Map names to values; repeated values are joined by commas."""
    headers: dict[str, str] = {}
    for name, value in fields:
        if name in _ONCE and name in headers:
            raise BadRequest(400, f"{name} is given twice")
        headers[name] = value if name not in headers else f"{headers[name]}, {value}"
    return headers


def _length(headers: dict[str, str]) -> int | None:
    encoding = headers.get("transfer-encoding")
    if encoding is not None:
        if encoding.lower() != "chunked" or "content-length" in headers:
            raise BadRequest(400, "transfer-encoding must be chunked, without a content-length")
        return -1
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise BadRequest(400, "content-length is not a number")
    return int(text)


def chunk_size(line: bytes) -> int:
    """Parse the line before a chunk: its size in bytes, and extensions, which are ignored."""
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise BadRequest(400, "the size of a chunk is malformed")
    return int(match[1], 16)


def too_large(limit: int) -> BadRequest:
    """Build the error for a body of more than `limit` bytes."""
    why = f"body: larger than {limit} bytes; send less, or raise --max-request-body-size-mb"
    return BadRequest(413, why)


class ChunkedBody:
    """Takes a chunked body out of a buffer, piece by piece."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = self._trailers = 0
        self._left = -1  # of the chunk at hand; −1: its size comes next; −2: trailers come next

    def feed(self, buffer: bytearray) -> bytes | None:
        """Remove chunks from the front of the buffer; return the body once complete, else None."""
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
                parse_field(line)  # ignored, but must be valid: it could be the next request
                self._trailers += 1
                if self._trailers > MAX_HEADERS:
                    raise BadRequest(431, f"more than {MAX_HEADERS} headers behind the body")
                continue
            size = chunk_size(line)
            self._size += size
            if self._size > self._limit:
                raise too_large(self._limit)
            self._left = size if size else -2
