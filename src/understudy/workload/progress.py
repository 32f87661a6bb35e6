"""Report progress while traces are read and written.

A context variable carries the callback, because readers, including user-defined ones, have no parameter for it.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from _typeshed import WriteableBuffer

    Listener = Callable[[str, int, int], None]

_Item = TypeVar("_Item")

_ITEMS_PER_REPORT = 256
_BUFFER_BYTES = 1 << 20

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def reporting_progress(listener: Listener | None) -> Iterator[None]:
    """Call `listener(task, done, total)` while traces are read and written inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(task: str, done: int, total: int) -> None:
    """Notify the listener, if there is one."""
    if (listener := _listener.get()) is not None:
        listener(task, done, total)


def iterate_reporting(task: str, items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the items and report progress once per 256 of them."""
    for done, item in enumerate(items):
        if done % _ITEMS_PER_REPORT == 0:
            report_progress(task, done, len(items))
        yield item
    report_progress(task, len(items), len(items))


def open_reporting(path: Path) -> io.BufferedReader:
    """Open a file for reading in binary mode and report the bytes read."""
    if _listener.get() is None:
        return path.open("rb")
    return io.BufferedReader(_ReportingFile(path), _BUFFER_BYTES)


class _ReportingFile(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(os.fspath(path))
        self._size = os.fstat(self.fileno()).st_size
        self._done = 0

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        return self._report(super().readinto(buffer))

    def readall(self) -> bytes:
        data = super().readall()
        self._report(len(data))
        return data

    def _report(self, count: int | None) -> int | None:
        self._done += count or 0
        if self._size:  # a pipe has size 0
            report_progress("reading", self._done, max(self._size, self._done))
        return count
