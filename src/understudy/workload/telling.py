"""How far the reading of a trace is. Readers are many, users write more, and none has a parameter for it."""

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

    Told = Callable[[str, int, int], None]

_Item = TypeVar("_Item")

_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20

_told: ContextVar[Told | None] = ContextVar("told", default=None)


@contextmanager
def telling(told: Told | None) -> Iterator[None]:
    """Within the block, traces that are read and written tell `told(what, done, of)`."""
    before = _told.set(told)
    try:
        yield
    finally:
        _told.reset(before)


def tell(what: str, done: int, of: int) -> None:
    """To whom it may concern."""
    if (told := _told.get()) is not None:
        told(what, done, of)


def counted(what: str, items: Sequence[_Item]) -> Iterator[_Item]:
    """The items, told now and then."""
    for done, item in enumerate(items):
        if done % _AT_ONCE == 0:
            tell(what, done, len(items))
        yield item
    tell(what, len(items), len(items))


def open_counted(path: Path) -> io.BufferedReader:
    """As `path.open("rb")`; what is read of the file is told, in bytes."""
    if _told.get() is None:
        return path.open("rb")
    return io.BufferedReader(_CountedFile(path), _BUFFER_BYTES)


class _CountedFile(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(os.fspath(path))
        self._size = os.fstat(self.fileno()).st_size
        self._done = 0

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        return self._noted(super().readinto(buffer))

    def readall(self) -> bytes:
        data = super().readall()
        self._noted(len(data))
        return data

    def _noted(self, count: int | None) -> int | None:
        self._done += count or 0
        if self._size:  # a pipe has none
            tell("reading", self._done, max(self._size, self._done))
        return count
