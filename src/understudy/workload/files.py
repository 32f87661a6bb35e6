"""Trace files as binary streams of UTF-8 lines: plain or gzipped, from a file or standard input."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import sys
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from understudy.errors import InvalidArgument
from understudy.outputs import create
from understudy.workload.progress import open_reporting

if TYPE_CHECKING:
    from collections.abc import Iterator

STDIN = "-"
"""Name of a trace that means standard input."""

_GZIP = b"\x1f\x8b"
_UNZIPPED_AT_ONCE = 1 << 18


@contextmanager
def open_trace(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a trace as a stream of UTF-8; detect gzip, a byte order mark and UTF-16 from its first bytes.

    Errors: InvalidArgument, naming the file, if it cannot be opened, read, decompressed or decoded.
    """
    try:
        with ExitStack() as stack:
            if os.fspath(path) == STDIN:
                raw = _make_peekable(sys.stdin.buffer)
            else:
                raw = stack.enter_context(open_reporting(Path(path)))
            if Path(path).suffix == ".gz" or raw.peek(2).startswith(_GZIP):
                zipped = cast("io.RawIOBase", stack.enter_context(gzip.GzipFile(fileobj=raw)))
                raw = io.BufferedReader(zipped, _UNZIPPED_AT_ONCE)
            yield _convert_to_utf8(raw)
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise InvalidArgument(f"cannot read trace {path}: {error}") from error


@contextmanager
def create_trace(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Create or replace a trace with `outputs.create`; equal content gives equal bytes, gzipped or not.

    Errors: InvalidArgument, naming the file, if it cannot be written.
    """
    with create(path) as raw:
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped:
                yield zipped  # type: ignore[misc]
        else:
            yield raw


def _make_peekable(raw: IO[bytes] | gzip.GzipFile) -> io.BufferedReader:
    if isinstance(raw, io.BufferedReader):
        return raw
    return io.BufferedReader(cast("io.RawIOBase", raw))


def _convert_to_utf8(raw: io.BufferedReader) -> IO[bytes]:
    """Convert a stream to UTF-8 without a byte order mark; a zero among its first bytes means UTF-16."""
    start = raw.peek(4)
    if start.startswith(codecs.BOM_UTF8):
        raw.read(len(codecs.BOM_UTF8))
        return raw
    for encoding, known in (
        ("utf-16", start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))),
        ("utf-16-le", start[1:2] == b"\0"),
        ("utf-16-be", start[:1] == b"\0"),
    ):
        if known:
            return io.BufferedReader(_Utf8Stream(raw, encoding), _Utf8Stream.CHUNK)
    return raw


class _Utf8Stream(io.RawIOBase):
    """Bytes in UTF-8 of a stream in another encoding; the cost is linear in its length, however long the lines."""

    CHUNK = 1 << 20

    def __init__(self, raw: IO[bytes], encoding: str) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            chunk = self._raw.read(self.CHUNK)
            self._ready = memoryview(self._decoder.decode(chunk, final=not chunk).encode())
            if not chunk:
                break
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
