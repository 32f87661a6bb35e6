"""Trace files, plain or gzipped (by their `.gz` ending), as binary streams."""

from __future__ import annotations

import gzip
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


@contextmanager
def open_trace(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a trace for reading bytes.

    Errors: InvalidArgument, naming the file, when it cannot be opened, read or decompressed.
    """
    try:
        with Path(path).open("rb") as raw:
            if Path(path).suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as unzipped:
                    yield unzipped  # type: ignore[misc]
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgument(f"cannot read trace {path}: {error}") from error


@contextmanager
def create_trace(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Create or overwrite a trace. The same content gives the same bytes, gzipped or not.

    Errors: InvalidArgument, naming the file, when it cannot be written.
    """
    try:
        with Path(path).open("wb") as raw:
            if Path(path).suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped:
                    yield zipped  # type: ignore[misc]
            else:
                yield raw
    except OSError as error:
        raise InvalidArgument(f"cannot write trace {path}: {error}") from error
