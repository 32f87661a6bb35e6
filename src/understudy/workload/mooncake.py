"""Reader of Mooncake JSONL: one request per line, with a hash id per block of its prompt.

Keys: `output_length` (or `output_tokens`) and `hash_ids` are required; `input_length` (or `input_tokens`),
`timestamp` (or `created_time`, ms), `delay` (or `delay_ms`, ms), `session_id`, `request_id`,
`output_token_ids`, `accepted_drafts`, `max_tokens`, `priority`, `abort_after_ms`, `elapsed_ms`, `strict_priority`,
`policy_class`, `lora` (the name of an adapter) are optional; so is `output_in_next_turn`, an extension of Understudy
(the next turn's prompt is this prompt, this output, and more), and `notes`, another one: sentences on what the trace's
source lacked, usually in the first row; every report repeats them. AIPerf's `group_id` is accepted: sessions with equal
prefixes, which their hash ids say too. null means absent. Other keys are counted and named in a
note; one that resembles a known key, or that says in other formats when a request arrives, is an error.

Rules: rows with the same `session_id` are the turns of one session, in file order; a row without is its own
session. Either every first turn has a timestamp, or none (then the workload can only run closed loop). A
first turn has no delay; a later turn waits for its explicit delay, else for the difference of its timestamp
and that of the turn before, else not at all. Times are rounded once, to whole nanoseconds. A missing
`input_length` means that the prompt fills its blocks. `output_length` is the number of tokens the model generates;
`max_tokens` is the request's limit, which may cut them (a missing one is no limit). `accepted_drafts` is, for runs with
speculation, the number of drafts accepted in the step whose first output has number p: entry p modulo its length.
`abort_after_ms`, an extension too, is the time from the arrival of the request until its client aborts it. `elapsed_ms`
is another one, for later turns: the time since the session's first turn, as the source recorded it; without it, a later
turn's timestamp says so. It orders the requests of cache curves, and is not replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from understudy.checks import whole_number
from understudy.errors import InvalidArgument
from understudy.workload.columns import (
    Int32Column,
    Int64Column,
    RowError,
    UInt32Column,
    column,
    first_row,
    intern_ids,
    next_turn_rows,
    offsets_of,
    ragged_positions,
)
from understudy.workload.files import open_trace
from understudy.workload.mooncake_rows import TraceChunk, describe_unread, read_chunks
from understudy.workload.times import milliseconds_to_ns
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from understudy.workload.columns import BoolColumn

DEFAULT_TRACE_BLOCK_SIZE = 512
_ROWS_TO_INFER = 8
"""Prompts of several blocks from which a block size can be inferred."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

# Keys in the file whose column is named differently.
_KEYS = {
    "prompt_tokens": "input_length",
    "output_tokens": "output_length",
    "output_in_next": "output_in_next_turn",
}


def read_mooncake(
    path: str | os.PathLike[str],
    *,
    trace_block_size: int | None = None,
    clamp_input_length: bool = False,
    drop_surplus_hash_ids: bool = False,
) -> Workload:
    """Read a Mooncake trace (`.gz` is decompressed) in file order; the module describes the format.

    `trace_block_size` is the number of tokens per hash id. Default: 512, or the only power of two that fits the lengths
    of all prompts; a note then names it.

    An `input_length` above len(hash_ids)·trace_block_size is an error, and so are more hash ids than the
    prompt has blocks: both hint at a wrong `trace_block_size`. `clamp_input_length` and
    `drop_surplus_hash_ids` accept them instead; the workload counts what they changed.

    Errors: InvalidArgument `FILE:LINE: …` for a bad row, or when the file cannot be read; ConfigError for a
    bad option.
    """
    return read_with_lines(path, trace_block_size, clamp_input_length, drop_surplus_hash_ids)[0]


def read_with_lines(
    path: str | os.PathLike[str],
    trace_block_size: int | None,
    clamp_input_length: bool,
    drop_surplus_hash_ids: bool,
) -> tuple[Workload, Int64Column]:
    """Read like `read_mooncake`; also return the line number of each row."""
    if trace_block_size is not None:
        trace_block_size = whole_number("trace_block_size", trace_block_size, 1)
    with open_trace(path) as file:
        chunks = list(read_chunks(file, str(path)))
    trace = _Trace(str(path), chunks)
    if trace_block_size is None:
        fits_all = not (clamp_input_length or drop_surplus_hash_ids)
        trace_block_size = trace.find_block_size() if fits_all else DEFAULT_TRACE_BLOCK_SIZE
    clamped, dropped = trace.fit_prompts(trace_block_size, clamp_input_length, drop_surplus_hash_ids)
    trace.find_sessions()
    trace.find_times()
    return trace.workload(trace_block_size, clamped, dropped), trace.lines


class _Trace:
    """Columns of one file while they are converted to a workload."""

    def __init__(self, name: str, chunks: Sequence[TraceChunk]) -> None:
        self._name = name
        self._chunks = chunks
        self.lines = _join([chunk.lines for chunk in chunks], np.int64)
        self._prompt = _join([chunk.input_length for chunk in chunks], np.int64)
        self._counts = _join([chunk.hash_counts for chunk in chunks], np.int64)
        self._ids = _join([chunk.hash_ids for chunk in chunks], np.uint64)
        self._notes = [note for chunk in chunks for note in chunk.notes] + describe_unread(chunks)

    def find_block_size(self) -> int:
        """Return 512 if it fits all prompts, else the only power of two that does, with a note; else 512."""
        default = DEFAULT_TRACE_BLOCK_SIZE
        rows = (self._prompt > 0) & (self._counts > 1)
        prompt, counts = self._prompt[rows], self._counts[rows]
        if len(prompt) < _ROWS_TO_INFER:
            return default
        least, most = int((-(-prompt // counts)).max()), int(((prompt - 1) // (counts - 1)).min())
        sizes = [1 << power for power in range(31) if least <= 1 << power <= most]
        if len(sizes) != 1 or least <= default <= most:
            return default
        self._notes.append(
            f"hash ids have {sizes[0]} tokens each: no other power of two fits the prompts' lengths "
            "(--trace-block-size)"
        )
        return sizes[0]

    def fit_prompts(self, block_size: int, clamp: bool, drop_surplus: bool) -> tuple[int, int]:
        """Match prompt lengths and numbers of hash ids; return the numbers of clamped prompts and dropped ids."""
        capacity = self._counts * block_size
        prompt = np.where(self._prompt < 0, capacity, self._prompt)
        too_long = prompt > capacity
        row = first_row(too_long)
        if row is not None and not clamp:
            self._fail(
                row,
                f"input_length {prompt[row]} exceeds {self._counts[row]} hash_ids of {block_size} tokens; check "
                "trace_block_size, or shorten such prompts with clamp_input_length (--clamp-input-length)",
            )
        self._prompt = np.minimum(prompt, capacity)
        counts = -(-self._prompt // block_size)
        dropped = len(self._ids) - int(counts.sum())
        if dropped:
            row = first_row(self._counts > counts)
            if row is not None and not drop_surplus:
                self._fail(
                    row,
                    f"input_length {prompt[row]} needs {counts[row]} hash_ids of {block_size} tokens, got "
                    f"{self._counts[row]}; check trace_block_size (--trace-block-size; 16 for converted logs), or drop "
                    "the rest with drop_surplus_hash_ids (--drop-surplus-hash-ids)",
                )
            self._ids = self._ids[ragged_positions(offsets_of(self._counts)[:-1], counts)]
            self._counts = counts
        return int(too_long.sum()), dropped

    def find_sessions(self) -> None:
        """Number the sessions and their turns in file order."""
        rows = len(self.lines)
        names = self._names("session_id")
        self._session: Int32Column = np.arange(rows, dtype=np.int32)
        self._turn: Int32Column = np.zeros(rows, np.int32)
        self._session_ids: list[str] | None = None
        if names is None:
            return
        self._session_ids = []
        known: dict[str, int] = {}
        turns: list[int] = []
        for row, name in enumerate(names):
            session = len(turns) if name is None else known.setdefault(name, len(turns))
            if session == len(turns):
                turns.append(0)
                self._session_ids.append(self._default_name(row) if name is None else name)
            self._session[row] = session
            self._turn[row] = turns[session]
            turns[session] += 1
        for row, name in enumerate(names):
            if name is None and self._default_name(row) in known:
                self._fail(
                    row,
                    f"session_id is missing, and the default {self._default_name(row)!r} is taken; give one",
                )

    def find_times(self) -> None:
        """Compute the arrivals of sessions and the delays of later turns."""
        timestamp_ms = _join([chunk.timestamp_ms for chunk in self._chunks], np.float64)
        delay_ms = _join([chunk.delay_ms for chunk in self._chunks], np.float64)
        has_timestamp, has_delay = ~np.isnan(timestamp_ms), ~np.isnan(delay_ms)
        time_ns = milliseconds_to_ns(timestamp_ms)
        first = self._turn == 0
        row = first_row(first & has_delay & (delay_ms != 0))
        if row is not None:
            self._fail(row, f"delay must be absent or 0 on a session's first turn, got {delay_ms[row]}")
        self._has_arrivals = bool(has_timestamp[first].any()) or not len(first)
        row = first_row(first & ~has_timestamp)
        if row is not None and self._has_arrivals:
            self._fail(row, "timestamp is missing, but other first turns have one; give all or none")
        self._arrival_ns = time_ns[first][self._session]

        self._delay_ns = milliseconds_to_ns(delay_ms)
        following = next_turn_rows(self._session)
        before = np.flatnonzero(following >= 0)
        later = following[before]
        from_timestamp = has_timestamp[later] & ~has_delay[later]
        before, later = before[from_timestamp], later[from_timestamp]
        bad = first_row(~has_timestamp[before])
        if bad is not None:
            self._fail(
                int(later[bad]),
                "timestamp gives no delay, because the turn before has no timestamp; give a delay",
            )
        difference_ns = time_ns[later] - time_ns[before]
        bad = first_row(difference_ns < 0)
        if bad is not None:
            line = self.lines[before[bad]]
            self._fail(int(later[bad]), f"timestamp is earlier than that of the turn before, in line {line}")
        self._delay_ns[later] = difference_ns
        self._find_elapsed(time_ns, has_timestamp)

    def _find_elapsed(self, time_ns: Int64Column, has_timestamp: BoolColumn) -> None:
        """Compute when the source sent each later turn, since its session's first one; −1 where it does not say."""
        self._elapsed_ns: Int64Column | None = None
        later = self._turn > 0
        first = time_ns[~later][self._session]
        since_ns = np.where(has_timestamp & has_timestamp[~later][self._session], time_ns - first, -1)
        given_ms = self._times("elapsed_ms")
        if given_ms is not None:
            row = first_row(~later & ~np.isnan(given_ms))
            if row is not None:
                self._fail(row, f"elapsed_ms must be absent on a session's first turn, got {given_ms[row]}")
            since_ns = np.where(np.isnan(given_ms), since_ns, milliseconds_to_ns(given_ms))
        known = later & (since_ns >= 0)
        if known.any():
            self._elapsed_ns = np.where(known, since_ns, -1)

    def workload(self, block_size: int, clamped: int, dropped: int) -> Workload:
        """Build the workload; report an invalid value with its line."""
        output = _join([chunk.output_length for chunk in self._chunks], np.int64)
        priority = self._ints("priority")
        output_offsets, output_ids = self._output_tokens()
        draft_offsets, drafts = self._accepted_drafts()
        policy_class, policy_classes = self._indexed("policy_class")
        adapter, adapters = self._indexed("lora")
        try:
            return Workload(
                arrival_ns=self._arrival_ns,
                prompt_tokens=column("prompt_tokens", self._prompt, np.int32),
                output_tokens=column("output_tokens", output, np.int32),
                hash_offsets=offsets_of(self._counts),
                hash_ids=intern_ids(self._ids),
                trace_block_size=block_size,
                has_arrivals=self._has_arrivals,
                session=self._session,
                turn=self._turn,
                delay_ns=self._delay_ns,
                elapsed_ns=self._elapsed_ns,
                max_tokens=self._limits(),
                priority=column(
                    "priority", np.zeros(len(output), np.int32) if priority is None else priority, np.int32
                ),
                output_token_offsets=output_offsets,
                output_token_ids=output_ids,
                accepted_draft_offsets=draft_offsets,
                accepted_drafts=drafts,
                output_in_next=self._output_in_next(),
                abort_after_ns=self._aborts(),
                strict_priority=self._ints("strict_priority"),
                policy_class=policy_class,
                policy_classes=policy_classes,
                adapter=adapter,
                adapters=adapters,
                request_ids=self._request_ids(),
                session_ids=self._session_ids,
                clamped_prompts=clamped,
                dropped_hash_ids=dropped,
                notes=tuple(dict.fromkeys(self._notes)),
            )
        except RowError as error:
            self._fail(error.row, f"{_KEYS.get(error.field, error.field)} {error.reason}")

    def _fail(self, row: int, reason: str) -> NoReturn:
        raise InvalidArgument(f"{self._name}:{self.lines[row]}: {reason}") from None

    def _default_name(self, row: int) -> str:
        return f"request_{self.lines[row]}"

    def _names(self, key: str) -> list[str | None] | None:
        parts: list[list[str | None] | None] = [getattr(chunk, key) for chunk in self._chunks]
        if all(part is None for part in parts):
            return None
        joined: list[str | None] = []
        for part, chunk in zip(parts, self._chunks, strict=True):
            joined += [None] * len(chunk.lines) if part is None else part
        return joined

    def _ints(self, key: str) -> Int64Column | None:
        parts: list[Int64Column | None] = [getattr(chunk, key) for chunk in self._chunks]
        return _join_optional(parts, self._chunks, np.int64)

    def _times(self, key: str) -> NDArray[np.float64] | None:
        """Join an optional column of times in ms, NaN where absent."""
        parts: list[NDArray[np.float64] | None] = [getattr(chunk, key) for chunk in self._chunks]
        if all(part is None for part in parts):
            return None
        none = [np.full(len(chunk.lines), np.nan) for chunk in self._chunks]
        return _join(
            [own if part is None else part for part, own in zip(parts, none, strict=True)], np.float64
        )

    def _aborts(self) -> Int64Column | None:
        times_ms = self._times("abort_after_ms")
        return None if times_ms is None else np.where(np.isnan(times_ms), -1, milliseconds_to_ns(times_ms))

    def _limits(self) -> Int32Column | None:
        parts = [chunk.max_tokens for chunk in self._chunks]
        if all(part is None for part in parts):
            return None
        none = [np.full(len(chunk.lines), -1, np.int64) for chunk in self._chunks]
        joined = _join(
            [own if part is None else part for part, own in zip(parts, none, strict=True)], np.int64
        )
        return column("max_tokens", joined, np.int32)

    def _output_in_next(self) -> BoolColumn | None:
        return _join_optional([chunk.output_in_next for chunk in self._chunks], self._chunks, np.bool_)

    def _output_tokens(self) -> tuple[Int64Column | None, UInt32Column | None]:
        counts = _join_optional([chunk.output_token_counts for chunk in self._chunks], self._chunks, np.int64)
        if counts is None:
            return None, None
        ids = _join([c.output_token_ids for c in self._chunks if c.output_token_ids is not None], np.uint64)
        offsets = offsets_of(counts)
        bad = first_row(ids >= 2**32)
        if bad is not None:
            row = int(np.searchsorted(offsets, bad, side="right")) - 1
            self._fail(row, f"output_token_ids must lie in 0 … 2^32−1, got {ids[bad]}")
        return offsets, ids.astype(np.uint32)

    def _accepted_drafts(self) -> tuple[Int64Column | None, UInt32Column | None]:
        counts = _join_optional(
            [chunk.accepted_draft_counts for chunk in self._chunks], self._chunks, np.int64
        )
        if counts is None:
            return None, None
        drafts = _join([c.accepted_drafts for c in self._chunks if c.accepted_drafts is not None], np.uint64)
        return offsets_of(counts), np.minimum(drafts, 2**32 - 1).astype(np.uint32)

    def _indexed(self, key: str) -> tuple[Int32Column | None, tuple[str, ...]]:
        names = self._names(key)
        if names is None:
            return None, ()
        known: dict[str, int] = {}
        index = [-1 if name is None else known.setdefault(name, len(known)) for name in names]
        return np.array(index, np.int32), tuple(known)

    def _request_ids(self) -> list[str] | None:
        given = self._names("request_id")
        if given is None:
            return None
        names = [self._default_name(row) if name is None else name for row, name in enumerate(given)]
        if len(set(names)) < len(names):
            rows: dict[str, int] = {}
            for row, name in enumerate(names):
                if name in rows:
                    self._fail(row, f"request_id {name!r} was already used in line {self.lines[rows[name]]}")
                rows[name] = row
        return names


def _join(parts: list[NDArray[_Scalar]], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _join_optional(
    parts: list[NDArray[_Scalar] | None], chunks: Sequence[TraceChunk], dtype: type[_Scalar]
) -> NDArray[_Scalar] | None:
    if all(part is None for part in parts):
        return None
    zeros = [np.zeros(len(chunk.lines), dtype) for chunk in chunks]
    return np.concatenate([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])
