"""The store of a sweep: an append-only file with one JSON line per finished candidate."""

from __future__ import annotations

import fcntl
import os
from typing import IO, TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError, InvalidArgument
from understudy.sweep.candidate import Outcome

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class Store:
    """Finished candidates by key, in memory and, with a path, in a file that one process at a time may write.

    A torn last line, which a killed process leaves, is removed; every other line must be valid. Errors: InvalidArgument
    names the line; ConfigError if another process writes the file.
    """

    def __init__(self, path: Path | None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._file: IO[bytes] | None = None
        self._path = path
        if path is None:
            return
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path, self._file)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"--store {path}: another sweep writes it; name another file") from None
        except InvalidArgument:
            self._file.close()
            raise

    def _read(self, path: Path, file: IO[bytes]) -> None:
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                outcome = msgspec.json.decode(line, type=Outcome)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidArgument(
                    f"{path}, line {number}: not a finished candidate ({error}); name another file"
                ) from None
            self.outcomes[outcome.key] = outcome
            end += len(line)
        file.truncate(end)

    def add(self, outcome: Outcome) -> None:
        """Append an outcome; it is on its way to the disk when this returns."""
        self.outcomes[outcome.key] = outcome
        if self._file is not None:
            try:
                self._file.write(msgspec.json.encode(outcome) + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._cannot_write(error) from error

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                with file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> InvalidArgument:
        return InvalidArgument(
            f"--store {self._path}: cannot be written: {error.strerror}; free space or name another file"
        )

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
