"""Reader of tables of requests: CSV, JSON lines and Parquet with a time and two lengths, under any names."""

from __future__ import annotations

import csv
import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import ConfigError, InvalidArgument
from understudy.workload.files import open_trace
from understudy.workload.lengths import NO_CONTENT, json_lines, time_ns, timestamp_ns, token_count
from understudy.workload.row_filter import RowFilter, find_value
from understudy.workload.table_columns import find_columns, find_separator, read_columns
from understudy.workload.text import unique_ids
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BLOCK = 16
_EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6))
"""Least value of a number of ns, µs or ms since 1970, and its ns per unit; smaller ones are seconds."""
_PARQUET = b"PAR1"


def read_table(path: Path, *, columns: str | None = None, where: Sequence[str] = ()) -> Workload:
    """Read a table with a row per request: CSV (comma, tab, semicolon or bar), JSON lines, or Parquet (pyarrow).

    `columns` names them: `time=…,input=…,output=…`; those left out are found by their usual names. A time is ISO 8601,
    or a number in s, ms, µs or ns since 1970 by its size; small numbers are seconds. Rows are sorted by time; those
    without a prompt or an output, such as failed requests, are left out, and a note has their number. `where` keeps the
    rows whose columns have these values.

    Errors: InvalidArgument `FILE:LINE: …`; ConfigError for Parquet without pyarrow, and for a wrong option.
    """
    kept = RowFilter(where)
    given = read_columns(columns)
    times: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise InvalidArgument(f"{path}: the file is empty")
    found = find_columns(path, list(first[1]), given)
    empty = total = 0
    for place, row in itertools.chain([first], rows):
        total += 1
        if not kept.keeps(row):
            continue
        lengths = [
            _read_length(find_value(row, found[role]), found[role], place) for role in ("input", "output")
        ]
        if not all(lengths):
            empty += 1
            continue
        times.append(
            _read_time(find_value(row, found["time"]), found["time"], place) if "time" in found else 0
        )
        prompts.append(lengths[0])
        outputs.append(lengths[1])
    kept.check(total)
    notes = [NO_CONTENT, *kept.notes()]
    if empty:
        notes.append(f"{empty:,} of {total:,} rows are left out: no prompt or no output")
    return build_lengths(times, prompts, outputs, has_arrivals="time" in found, notes=notes)


def build_lengths(
    times: Sequence[int],
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    has_arrivals: bool,
    notes: Sequence[str],
) -> Workload:
    """Build a workload of lengths, sorted by time (ns), whose prompts share nothing."""
    order = np.argsort(np.array(times, np.int64), kind="stable")
    arrivals = np.array(times, np.int64)[order]
    lengths = np.array(prompts, np.int64)[order]
    offsets, ids = unique_ids(lengths, BLOCK)
    return Workload(
        arrival_ns=arrivals - arrivals.min(initial=arrivals[0] if len(arrivals) else 0),
        prompt_tokens=lengths.astype(np.int32),
        output_tokens=np.array(outputs, np.int64)[order].astype(np.int32),
        hash_offsets=offsets,
        hash_ids=ids,
        trace_block_size=BLOCK,
        has_arrivals=has_arrivals,
        notes=tuple(notes),
    )


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (FILE:LINE, row) of a CSV, of JSON lines or of a Parquet file."""
    with open_trace(path) as file:
        start = file.read(4)
    if start == _PARQUET:
        yield from _read_parquet(path)
    elif start.lstrip()[:1] == b"{":
        for place, row in json_lines(path):
            if not isinstance(row, dict):
                raise InvalidArgument(f"{place}: expected an object")
            yield place, row
    else:
        yield from _read_csv(path)


def _read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_trace(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        header = text.readline()
        lines = itertools.chain([header], text)
        rows = csv.DictReader(lines, delimiter=find_separator(header))
        try:
            for row in rows:
                yield f"{path}:{rows.line_num}", row
        except csv.Error as error:
            raise InvalidArgument(f"{path}:{rows.line_num}: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; pip install pyarrow, or export the table "
            "as CSV"
        ) from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", row


def _read_length(value: Any, name: str, place: str) -> int:
    """Return a number of tokens; 0 for an empty cell."""
    if value is None or value == "":
        return 0
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise InvalidArgument(f"{place}: {name} must be a number of tokens, got {value!r}") from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return token_count(value, name, place)


def _read_time(value: Any, name: str, place: str) -> int:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return timestamp_ns(value, place)
    if hasattr(value, "isoformat"):  # a timestamp of Parquet
        return timestamp_ns(value.isoformat(sep=" "), place)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgument(f"{place}: {name} must be a time, got {value!r}")
    scale = next((scale for least, scale in _EPOCHS if value >= least), 10**9)
    return time_ns(value, name, place, scale)
