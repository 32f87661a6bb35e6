"""Readers of traces whose rows contain only the new part of each prompt.

A prompt is everything before it in its session, answers included, plus the new part. `mooncake-delta` has Mooncake's
rows; `applied-compute` has one session per row: lengths of answers and tool outputs, and the latency of tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy._core import expand_deltas
from understudy.errors import InvalidArgument
from understudy.workload.columns import column, first_row, offsets_of, take_ragged
from understudy.workload.lengths import json_lines, time_ns, token_count
from understudy.workload.mooncake import read_with_lines
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.columns import BoolColumn, Int64Column

BLOCK = 16
"""Tokens per hash id of the resulting workload; small, because deltas and answers end anywhere."""
MAX_SESSION_TOKENS = 10_000_000
"""Limit of one session; a longer one is taken for a mistake in the file."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session: a delay, runs of equal tokens (name and length), then an answer."""

    delta: list[tuple[int, int]]
    output_tokens: int
    delay_ns: int = 0


def read_mooncake_delta(
    path: Path, *, trace_block_size: int | None = None, clamp_input_length: bool = False
) -> Workload:
    """Read Mooncake's rows (`session_id`, `hash_ids`, …) with only the new part of each turn's prompt.

    Errors: InvalidArgument `FILE:LINE: …` for a bad row; ConfigError for a bad option.
    """
    rows, lines = read_with_lines(path, trace_block_size, clamp_input_length, drop_surplus_hash_ids=False)
    for key, given in _unsupported_keys(rows):
        row = None if given is None else first_row(given)
        if row is not None:
            raise InvalidArgument(f"{path}:{lines[row]}: {key} is not supported by mooncake-delta; remove it")
    by_session = np.lexsort((rows.turn, rows.session))
    counts = np.diff(rows.hash_offsets)
    tokens = np.full(len(rows.hash_ids), rows.trace_block_size, np.int64)
    tokens[rows.hash_offsets[1:] - 1] = rows.prompt_tokens - (counts - 1) * rows.trace_block_size
    _, run_tokens = take_ragged(rows.hash_offsets, tokens, by_session)
    run_offsets, run_names = take_ragged(rows.hash_offsets, rows.hash_ids, by_session)
    arrivals = rows.arrival_ns[rows.turn == 0] if rows.has_arrivals else None
    workload = _grow(
        np.bincount(rows.session, minlength=rows.sessions),
        _Turns(
            run_offsets=run_offsets,
            run_names=run_names.astype(np.int64),
            run_tokens=run_tokens,
            output_tokens=rows.output_tokens[by_session].astype(np.int64),
            delay_ns=rows.delay_ns[by_session],
        ),
        arrivals,
    )
    if bool((by_session[1:] < by_session[:-1]).any()):
        workload = workload.take(np.argsort(by_session))  # as in the file
    return replace(
        workload,
        elapsed_ns=rows.elapsed_ns,
        request_ids=rows.request_ids,
        session_ids=rows.session_ids,
        notes=rows.notes,
    )


def _unsupported_keys(rows: Workload) -> Iterator[tuple[str, BoolColumn | None]]:
    """Yield the keys of Mooncake's rows that mooncake-delta rejects, with the rows that have them."""

    def is_given(index: NDArray[Any] | None, absent: int) -> BoolColumn | None:
        return None if index is None else index != absent

    def has_any(offsets: NDArray[Any] | None) -> BoolColumn | None:
        return None if offsets is None else np.diff(offsets) > 0

    yield "output_in_next_turn", rows.output_in_next
    yield "output_token_ids", has_any(rows.output_token_offsets)
    yield "max_tokens", is_given(rows.max_tokens, -1)
    yield "priority", is_given(rows.priority, 0)
    yield "lora", is_given(rows.adapter, -1)
    yield "accepted_drafts", has_any(rows.accepted_draft_offsets)
    yield "abort_after_ms", is_given(rows.abort_after_ns, -1)
    yield "strict_priority", is_given(rows.strict_priority, 0)
    yield "policy_class", is_given(rows.policy_class, -1)


def read_applied_compute(path: Path) -> Workload:
    """Read agent sessions, one per line, from the applied-compute format.

    A line has `input_prompt_length`, then for each of `num_turns` an `assistant_response_length`, a
    `tool_call_output_length` and a `tool_call_latency` (s), then `final_assistant_response_length`. A session of n
    turns becomes n + 1 requests. There are no arrivals (closed loop), and sessions share no prefix.
    Errors: InvalidArgument `FILE:LINE: …`.
    """
    sessions = []
    run_names = iter(range(2**62))
    for where, record in json_lines(path):
        turns = _read_count(record, "num_turns", where)
        lists = {
            name: _read_list(record, name, turns, where)
            for name in ("assistant_response_length", "tool_call_output_length", "tool_call_latency")
        }
        answers = [
            token_count(one, "assistant_response_length", where) for one in lists["assistant_response_length"]
        ]
        answers.append(_read_count(record, "final_assistant_response_length", where))
        added = [_read_count(record, "input_prompt_length", where)]
        added += [
            token_count(one, "tool_call_output_length", where) for one in lists["tool_call_output_length"]
        ]
        waits = [0, *(time_ns(one, "tool_call_latency", where) for one in lists["tool_call_latency"])]
        if not added[0]:
            raise InvalidArgument(f"{where}: input_prompt_length must be at least 1, got 0")
        sessions.append(
            [
                Turn([(next(run_names), length)] if length else [], answer, wait)
                for length, answer, wait in zip(added, answers, waits, strict=True)
            ]
        )
    return build_workload(sessions, None)


def build_workload(sessions: list[list[Turn]], arrivals_ns: NDArray[np.int64] | None) -> Workload:
    """Build a workload, session by session, whose prompts contain all earlier turns of their session."""
    turns = [turn for session in sessions for turn in session]
    runs = [run for turn in turns for run in turn.delta]
    return _grow(
        np.array([len(session) for session in sessions], np.int64),
        _Turns(
            run_offsets=offsets_of(np.array([len(turn.delta) for turn in turns], np.int64)),
            run_names=np.array([name for name, _ in runs], np.int64),
            run_tokens=np.array([length for _, length in runs], np.int64),
            output_tokens=np.array([turn.output_tokens for turn in turns], np.int64),
            delay_ns=np.array([turn.delay_ns for turn in turns], np.int64),
        ),
        arrivals_ns,
    )


@dataclass(frozen=True, slots=True)
class _Turns:
    """Turns as columns, session by session; runs of equal tokens are the new part of each."""

    run_offsets: Int64Column
    run_names: Int64Column
    run_tokens: Int64Column
    output_tokens: Int64Column
    delay_ns: Int64Column


def _grow(counts: Int64Column, turns: _Turns, arrivals_ns: Int64Column | None) -> Workload:
    """Build a workload whose sessions have these numbers of turns."""
    session_offsets = offsets_of(counts)
    prompt, hash_offsets, hash_ids, too_long = expand_deltas(
        session_offsets,
        turns.run_offsets,
        turns.run_names,
        turns.run_tokens,
        turns.output_tokens,
        BLOCK,
        MAX_SESSION_TOKENS,
    )
    if too_long >= 0:
        rows = slice(session_offsets[too_long], session_offsets[too_long + 1])
        runs = slice(turns.run_offsets[rows.start], turns.run_offsets[rows.stop])
        tokens = int(turns.run_tokens[runs].sum() + turns.output_tokens[rows].sum())
        raise InvalidArgument(
            f"session {too_long} has {tokens:,} tokens; at most {MAX_SESSION_TOKENS:,} are supported"
        )
    session = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    turn = np.arange(len(session)) - session_offsets[:-1][session]
    quoted = (turn + 1 < counts[session]) & (turns.output_tokens > 0)
    return Workload(
        arrival_ns=np.zeros(len(session), np.int64) if arrivals_ns is None else arrivals_ns[session],
        prompt_tokens=column("prompt_tokens", prompt, np.int32),
        output_tokens=column("output_tokens", turns.output_tokens, np.int32),
        hash_offsets=hash_offsets,
        hash_ids=hash_ids,
        trace_block_size=BLOCK,
        has_arrivals=arrivals_ns is not None or not len(counts),
        session=session,
        turn=turn.astype(np.int32),
        delay_ns=turns.delay_ns,
        output_in_next=quoted if quoted.any() else None,
    )


def _read_count(record: Any, name: str, where: str) -> int:
    if not isinstance(record, dict) or name not in record:
        raise InvalidArgument(f"{where}: {name} is missing")
    return token_count(record[name], name, where)


def _read_list(record: Any, name: str, length: int, where: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list) or len(value) != length:
        raise InvalidArgument(
            f"{where}: {name} must be a list of num_turns ({length}) entries, got {value!r:.80}"
        )
    return value
