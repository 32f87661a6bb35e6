"""Decode the lines of a trace as records of one type; errors name file, line and key."""

from __future__ import annotations

import re
from typing import IO, TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import numpy as np

from understudy._core import read_id_lists
from understudy.errors import InvalidArgument
from understudy.workload.files import STDIN, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column

T = TypeVar("T")
NO_IDS = msgspec.Raw(b"[]")
_IDS = msgspec.json.Decoder(list[int])
_PLACE = re.compile(r" - at `\$?\.?(.*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


def trace_files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the file itself, or all files of a folder with these suffixes (or `.gz` behind them), in path order.

    Errors: InvalidArgument if the folder has none.
    """
    if str(path) == STDIN or not path.is_dir():
        return [path]
    found = sorted(
        one
        for one in path.rglob("*")
        if one.is_file() and one.name.removesuffix(".gz").endswith(tuple(suffixes))
    )
    if not found:
        raise InvalidArgument(f"{path}: no file ends in {' or '.join(suffixes)}; give a folder of traces")
    return found


def read_records(path: Path, decoder: msgspec.json.Decoder[T]) -> Iterator[tuple[str, T]]:
    """Yield (`FILE:LINE`, record) for each line with content.

    A first line that is no whole JSON text begins one record that fills the file.
    Errors: InvalidArgument `FILE:LINE: KEY: …`.
    """
    with open_trace(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, decoder.decode(line)
            except msgspec.ValidationError as error:
                raise InvalidArgument(f"{where}: {describe(error)}") from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if "truncated" not in str(error):
                    raise InvalidArgument(f"{where}: {error}") from None
                yield _read_whole(path, number, line, file, decoder)
                return


def _read_whole(
    path: Path, first: int, start: bytes, file: IO[bytes], decoder: msgspec.json.Decoder[T]
) -> tuple[str, T]:
    text = start + file.read()
    try:
        return f"{path}:{first}", decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}:{first}: {describe(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        place = _BYTE.search(str(error))
        line = first + (text.count(b"\n", 0, int(place[1])) if place else 0)
        raise InvalidArgument(f"{path}:{line}: {error}") from None


def describe(error: Exception) -> str:
    """Return the message of a decoder as `KEY: problem`."""
    text = str(error)
    place = _PLACE.search(text)
    key, text = ("", text) if place is None else (place[1], text[: place.start()])
    if missing := _MISSING.fullmatch(text):
        return f"{f'{key}.' if key else ''}{missing[1]} is missing"
    return f"{key}: {text}" if key else text


def id_lists(
    raws: Sequence[msgspec.Raw], place_of: Callable[[int], tuple[str, str]]
) -> tuple[Int64Column, NDArray[np.uint64]]:
    """Return numbers of ids, and all ids, of JSON lists; `place_of(n)` is `FILE:LINE` and key of the n-th."""
    plain = read_id_lists(raws)
    if plain is not None:
        return plain
    lists = []
    for number, raw in enumerate(raws):
        try:
            ids = _IDS.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fail(*place_of(number), str(error).partition(" - at")[0])
        bad = next((value for value in ids if not 0 <= value < 2**64), None)
        if bad is not None:
            fail(*place_of(number), f"ids must lie in 0 … 2^64−1, got {bad}")
        lists.append(ids)
    counts = np.array([len(ids) for ids in lists], np.int64)
    return counts, np.array([value for ids in lists for value in ids], np.uint64)


def fail(where: str, key: str, problem: str) -> NoReturn:
    """Raise InvalidArgument `FILE:LINE: KEY: problem`."""
    raise InvalidArgument(f"{where}: {key}: {problem}")
