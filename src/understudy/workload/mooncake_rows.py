"""Decode the lines of a Mooncake trace into columns, one megabyte at a time.

Most traces have four keys and plain numbers; the core reads such rows. Any other chunk is decoded in one call and its
numbers are converted in bulk; lines are decoded one by one only to name an invalid line. Hash ids are most of a trace,
so they are never converted to Python integers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from understudy._core import read_plain_rows
from understudy.errors import InvalidArgument, InvariantViolated
from understudy.workload.columns import BoolColumn, Int64Column, first_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_CHUNK_BYTES = 1 << 20  # small enough for temporary arrays to stay in the cache
_ABSENT = msgspec.Raw(b"")
_WHITESPACE = b" \t\r\n"


class _AnyRow(msgspec.Struct, gc=False):
    timestamp: float | int | None = None
    created_time: float | int | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None
    hash_ids: msgspec.Raw = _ABSENT
    delay: float | int | None = None
    delay_ms: float | int | None = None
    session_id: str | None = None
    group_id: int | str | None = None
    request_id: str | None = None
    output_token_ids: msgspec.Raw = _ABSENT
    accepted_drafts: msgspec.Raw = _ABSENT
    priority: int | None = None
    abort_after_ms: float | int | None = None
    elapsed_ms: float | int | None = None
    strict_priority: int | None = None
    policy_class: str | None = None
    lora: str | None = None
    output_in_next_turn: bool | None = None
    notes: list[str] | None = None


class _Row(_AnyRow, forbid_unknown_fields=True, gc=False):
    """A row whose keys are all known."""


_KNOWN = _AnyRow.__struct_fields__
_VALUES = attrgetter(*_KNOWN)
_KEY = re.compile(rb'(?<!\\)"(?:' + "|".join(_KNOWN).encode() + rb')"\s*:')
_ROWS = msgspec.json.Decoder(_Row)
_ANY_ROWS = msgspec.json.Decoder(_AnyRow)
_OBJECTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ORDERS = frozenset(
    (
        *(
            "time",
            "time_ms",
            "time_s",
            "ts",
            "arrival",
            "arrival_ms",
            "arrival_s",
            "arrival_time",
            "created_at",
        ),
        *("wait_for", "dependencies", "not_before_ms", "turns", "prefix_length", "block_hashes"),
    )
)
"""Keys of other formats that say when a request arrives or what it shares: a replay without them would be wrong."""
_RESEMBLES = 0.75
"""Similarity of an unknown key to a known one from which it may be a typing error."""
_ID_LIST = msgspec.json.Decoder(list[int])
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, eq=False)
class TraceChunk:
    """Consecutive rows of a trace as columns; None for a column that no row has."""

    lines: Int64Column
    """Line number of each row, from 1."""
    input_length: Int64Column
    """−1 where absent, else ≥ 1."""
    output_length: Int64Column
    hash_counts: Int64Column
    hash_ids: NDArray[np.uint64]
    timestamp_ms: NDArray[np.float64]
    """NaN where absent."""
    delay_ms: NDArray[np.float64]
    """NaN where absent."""
    session_id: list[str | None] | None
    request_id: list[str | None] | None
    policy_class: list[str | None] | None
    lora: list[str | None] | None
    max_tokens: Int64Column | None
    """−1 where absent."""
    priority: Int64Column | None
    strict_priority: Int64Column | None
    output_in_next: BoolColumn | None
    output_token_counts: Int64Column | None
    output_token_ids: NDArray[np.uint64] | None
    accepted_draft_counts: Int64Column | None = None
    accepted_drafts: NDArray[np.uint64] | None = None
    abort_after_ms: NDArray[np.float64] | None = None
    """NaN where absent."""
    elapsed_ms: NDArray[np.float64] | None = None
    """NaN where absent."""
    notes: tuple[str, ...] = ()
    unread: Counter[str] = field(default_factory=Counter)
    """Rows that have each unknown key."""


def describe_unread(chunks: Sequence[TraceChunk]) -> list[str]:
    """Return a note that names the unknown keys of a trace, each once; empty without any."""
    unread: Counter[str] = sum((chunk.unread for chunk in chunks), Counter())
    if not unread:
        return []
    named = [f"{key} (in {count:,} row{'s' * (count > 1)})" for key, count in unread.most_common()]
    return [f"unknown keys were not read: {', '.join(named)}"]


def read_chunks(file: IO[bytes], name: str) -> Iterator[TraceChunk]:
    """Yield the rows of `file` in order, in chunks; error messages start with `name`.

    Errors: InvalidArgument `NAME:LINE: …` for a row that cannot be decoded or lacks a required key.
    """
    line = 1
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        cut = data.rfind(b"\n") + 1
        if not cut:
            rest += data
            continue
        lines = b"".join((rest, memoryview(data)[:cut]))
        rest = data[cut:]
        if (plain := _read_plain_chunk(lines, line)) is not None:
            yield plain
            line += len(plain.lines)
            continue
        decoding = _Decoding(lines, line, name)
        if len(decoding):
            yield decoding.columns()
        line += decoding.newlines
    decoding = _Decoding(rest, line, name)
    if len(decoding):
        yield decoding.columns()


def _read_plain_chunk(lines: bytes, first_line: int) -> TraceChunk | None:
    """Read rows that have only the usual keys and plain values; return None if any row differs."""
    columns = read_plain_rows(lines)
    if columns is None:
        return None
    timestamp_ms, input_length, output_length, hash_counts, hash_ids = columns
    return TraceChunk(
        lines=np.arange(first_line, first_line + len(hash_counts)),
        input_length=input_length,
        output_length=output_length,
        hash_counts=hash_counts,
        hash_ids=hash_ids,
        timestamp_ms=timestamp_ms,
        delay_ms=np.full(len(hash_counts), np.nan),
        session_id=None,
        request_id=None,
        policy_class=None,
        lora=None,
        max_tokens=None,
        priority=None,
        strict_priority=None,
        output_in_next=None,
        output_token_counts=None,
        output_token_ids=None,
    )


class _Decoding:
    """Decode one chunk of whole lines into columns."""

    def __init__(self, data: bytes, first_line: int, name: str) -> None:
        self._data = data
        self._first_line = first_line
        self._name = name
        self.newlines = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")))
        self._unread: Counter[str] = Counter()
        self._rows: Sequence[_AnyRow]
        try:
            self._rows = _ROWS.decode_lines(data)
        except _DECODE_ERRORS:
            self._rows = self._decode_around_unknown_keys()
        self._lines = self._line_numbers()
        self._reject_repeated_keys()

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> TraceChunk:
        """Convert the rows; raise InvalidArgument on the first invalid value."""
        hash_counts, hash_ids = self._id_lists("hash_ids", self._raws("hash_ids"))
        output_counts: Int64Column | None = None
        output_ids: NDArray[np.uint64] | None = None
        outputs = self._raws("output_token_ids")
        if any(raw is not _ABSENT for raw in outputs):
            output_counts, output_ids = self._id_lists("output_token_ids", outputs, required=False)
        draft_counts: Int64Column | None = None
        drafts: NDArray[np.uint64] | None = None
        accepted = self._raws("accepted_drafts")
        if any(raw is not _ABSENT for raw in accepted):
            draft_counts, drafts = self._id_lists("accepted_drafts", accepted, required=False)
        in_next = self._values("output_in_next_turn")
        return TraceChunk(
            lines=self._lines,
            input_length=self._input_lengths(),
            output_length=self._required_ints("output_length", "output_tokens"),
            hash_counts=hash_counts,
            hash_ids=hash_ids,
            timestamp_ms=self._milliseconds("timestamp", "created_time"),
            delay_ms=self._milliseconds("delay", "delay_ms"),
            session_id=self._values("session_id"),
            request_id=self._values("request_id"),
            policy_class=self._values("policy_class"),
            lora=self._values("lora"),
            max_tokens=self._limits(),
            priority=self._optional_ints("priority"),
            strict_priority=self._optional_ints("strict_priority"),
            output_in_next=None if in_next is None else np.array([bool(flag) for flag in in_next]),
            output_token_counts=output_counts,
            output_token_ids=output_ids,
            accepted_draft_counts=draft_counts,
            accepted_drafts=drafts,
            abort_after_ms=self._milliseconds("abort_after_ms") if self._values("abort_after_ms") else None,
            elapsed_ms=self._milliseconds("elapsed_ms") if self._values("elapsed_ms") else None,
            notes=tuple(note for notes in self._values("notes") or () for note in notes or ()),
            unread=self._unread,
        )

    def _decode_around_unknown_keys(self) -> Sequence[_AnyRow]:
        """Decode the known keys and count the others; InvalidArgument for those that may matter, and bad values."""
        for line, text in self._texts():
            if text.strip(_WHITESPACE):
                try:
                    unknown = _OBJECTS.decode(text).keys() - _KNOWN
                except _DECODE_ERRORS:
                    self._explain_undecodable()
                for key in unknown:
                    self._check_unread(line, key)
                self._unread.update(unknown)
        try:
            return _ANY_ROWS.decode_lines(self._data)
        except _DECODE_ERRORS:
            self._explain_undecodable()

    def _check_unread(self, line: int, key: str) -> None:
        """Raise InvalidArgument for an unknown key without which the row might be read wrongly."""
        if key in self._unread:
            return
        similar = get_close_matches(key, _KNOWN, 1, _RESEMBLES)
        if similar or key in _ORDERS:
            hint = f"{similar[0]} may be meant" if similar else "it may change arrivals or prompts"
            raise InvalidArgument(
                f"{self._name}:{line}: unknown key {key!r}; {hint}; known are {', '.join(_KNOWN)}"
            )

    def _line_numbers(self) -> Int64Column:
        if self.newlines + (not self._data.endswith(b"\n")) == len(self._rows):
            return np.arange(self._first_line, self._first_line + len(self._rows))
        lines = [line for line, text in self._texts() if text.strip(_WHITESPACE)]
        if len(lines) != len(self._rows):  # an object over several lines, or several on one
            self._explain_undecodable()
        return np.array(lines, np.int64)

    def _reject_repeated_keys(self) -> None:
        """Raise InvalidArgument for a repeated key, of which JSON decoders take the last.

        Lines are parsed one by one only if the chunk's number of keys differs from the number of values.
        """
        given = sum(
            value is not None and value is not _ABSENT for row in self._rows for value in _VALUES(row)
        )
        if b"null" not in self._data and len(_KEY.findall(self._data)) == given:
            return
        for line, text in self._texts():
            if text.strip(_WHITESPACE):
                json.loads(text, object_pairs_hook=partial(self._check_unique, line))

    def _check_unique(self, line: int, pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise InvalidArgument(f"{self._name}:{line}: {key} is given twice")

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self._data.split(b"\n"), self._first_line)

    def _explain_undecodable(self) -> NoReturn:
        for line, text in self._texts():
            if not text.strip(_WHITESPACE):
                continue
            try:
                _ANY_ROWS.decode(text)
            except _DECODE_ERRORS as error:
                raise InvalidArgument(f"{self._name}:{line}: {_describe(error)}") from None
        raise InvariantViolated(
            f"{self._name}: the lines from {self._first_line} on decode one by one, but not together"
        )

    def _fail(self, row: int, reason: str) -> NoReturn:
        raise InvalidArgument(f"{self._name}:{self._lines[row]}: {reason}")

    def _raws(self, key: str) -> list[msgspec.Raw]:
        return list(map(attrgetter(key), self._rows))

    def _values(self, key: str, alias: str | None = None) -> list[Any] | None:
        """Return the values of a key or its alias; None if no row has either."""
        values: list[Any] | None = list(map(attrgetter(key), self._rows))
        if values is not None and values.count(None) == len(values):
            values = None
        others = None if alias is None else self._values(alias)
        if values is None or others is None:
            return others if values is None else values
        for row, (value, other) in enumerate(zip(values, others, strict=True)):
            if value is None:
                values[row] = other
            elif other is not None:
                self._fail(row, f"has both {key} and {alias}; give one")
        return values

    def _required_ints(self, key: str, alias: str) -> Int64Column:
        values = self._values(key, alias)
        if values is None or None in values:
            self._fail(0 if values is None else values.index(None), f"{key} is required")
        return self._int64(key, values)

    def _optional_ints(self, key: str) -> Int64Column | None:
        values = self._values(key)
        return None if values is None else self._int64(key, [value or 0 for value in values])

    def _limits(self) -> Int64Column | None:
        values = self._values("max_tokens")
        if values is None:
            return None
        bad = next((row for row, value in enumerate(values) if value is not None and value < 1), None)
        if bad is not None:
            self._fail(bad, f"max_tokens must be at least 1, got {values[bad]}")
        return self._int64("max_tokens", [-1 if value is None else value for value in values])

    def _input_lengths(self) -> Int64Column:
        values = self._values("input_length", "input_tokens")
        if values is None:
            return np.full(len(self._rows), -1)
        if None not in values:
            lengths = self._int64("input_length", values)
        else:
            lengths = self._int64("input_length", [-1 if value is None else value for value in values])
        bad = next((row for row in np.flatnonzero(lengths < 1) if values[row] is not None), None)
        if bad is not None:
            self._fail(int(bad), f"input_length must be at least 1, got {values[bad]}")
        return lengths

    def _int64(self, key: str, values: list[int]) -> Int64Column:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            row = next(row for row, value in enumerate(values) if not -(2**63) <= value < 2**63)
            self._fail(row, f"{key} must fit 64 bits, got {values[row]}")

    def _milliseconds(self, key: str, alias: str | None = None) -> NDArray[np.float64]:
        values = self._values(key, alias)
        if values is None:
            return np.full(len(self._rows), np.nan)
        try:
            times_ms = np.array(values, np.float64)  # None becomes NaN
        except OverflowError:
            row = next(row for row, value in enumerate(values) if value is not None and abs(value) >= 2**63)
            self._fail(row, f"{key} must be below 2^63 ns, got {values[row]} ms")
        bad = first_row((times_ms < 0) | (times_ms >= 2**63 / 1e6))
        if bad is not None:
            self._fail(bad, f"{key} must be at least 0 ms and below 2^63 ns, got {values[bad]}")
        return times_ms

    def _id_lists(
        self, key: str, raws: Sequence[msgspec.Raw], *, required: bool = True
    ) -> tuple[Int64Column, NDArray[np.uint64]]:
        plain = _read_plain_id_lists(raws)
        if plain is not None:
            return plain
        lists: list[list[int]] = []
        for row, raw in enumerate(raws):
            if raw is _ABSENT or bytes(raw) == b"null":
                if required:
                    self._fail(row, f"{key} is required")
                lists.append([])
                continue
            try:
                ids = _ID_LIST.decode(raw)
            except _DECODE_ERRORS as error:
                self._fail(row, _describe(error, key))
            if required and not ids:
                self._fail(row, f"{key} must not be empty")
            for value in ids:
                if not 0 <= value < 2**64:
                    self._fail(row, f"{key} must lie in 0 … 2^64−1, got {value}")
            lists.append(ids)
        counts = np.array([len(ids) for ids in lists], np.int64)
        return counts, np.array([value for ids in lists for value in ids], np.uint64)


def _read_plain_id_lists(raws: Sequence[msgspec.Raw]) -> tuple[Int64Column, NDArray[np.uint64]] | None:
    """Convert non-empty lists of plain non-negative integers in bulk; return None for any other content."""
    text = b",".join(raws)
    characters = np.frombuffer(text, np.uint8)
    digit = characters - np.uint8(ord("0")) < 10
    comma, opening, closing, blank = (characters == ord(character) for character in ",[] ")
    known = sum(np.count_nonzero(mask) for mask in (digit, comma, opening, closing, blank))
    starts = np.flatnonzero(opening)
    if known != len(text) or len(starts) != len(raws) or starts[0] != 0 or not digit[starts + 1].all():
        return None
    if not (closing[starts[1:] - 2].all() and comma[starts[1:] - 1].all()):  # nested lists
        return None
    # Every id but the last is followed by a comma; the comma between two lists counts for the first list.
    commas = np.flatnonzero(comma)
    bounds = np.append(np.searchsorted(commas, starts), len(commas) + 1)
    ids = np.fromstring(text.replace(b"[", b" ").replace(b"]", b" "), np.uint64, sep=",")
    if (
        len(ids) != len(commas) + 1 or ids.max() == 2**64 - 1
    ):  # fromstring returns 2^64−1 for larger numbers too
        return None
    return np.diff(bounds), ids


def _describe(error: Exception, key: str | None = None) -> str:
    text = str(error)
    where = re.search(r" - at `\$(.*)`$", text)
    if where is None:
        return text if key is None else f"{key}: {text}"
    place = f"{key or ''}{where[1]}".lstrip(".")
    return f"{place}: {text[: where.start()]}"
