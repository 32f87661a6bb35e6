"""Readers of traces whose rows contain only the new part of each prompt.

A prompt is everything before it in its session, answers included, plus the new part. `mooncake-delta` has Mooncake's
rows; `applied-compute` has one session per row: lengths of answers and tool outputs, and the latency of tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.columns import first_row
from understudy.workload.lengths import json_lines, time_ns, token_count
from understudy.workload.mooncake import read_with_lines
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.columns import BoolColumn

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
    sessions: list[list[Turn]] = [[] for _ in range(rows.sessions)]
    for row in range(len(rows)):
        prompt, size = int(rows.prompt_tokens[row]), rows.trace_block_size
        ids = rows.prompt_hash_ids(row).tolist()
        delta = [(number, min(size, prompt - place * size)) for place, number in enumerate(ids)]
        sessions[int(rows.session[row])].append(
            Turn(delta, int(rows.output_tokens[row]), int(rows.delay_ns[row]))
        )
    arrivals = rows.arrival_ns[rows.turn == 0] if rows.has_arrivals else None
    in_file_order = np.argsort(np.lexsort((rows.turn, rows.session)))
    workload = build_workload(sessions, arrivals).take(in_file_order)
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
    columns: dict[str, list[Any]] = {
        name: [] for name in ("arrival", "prompt", "output", "session", "turn", "delay", "quoted")
    }
    ids: list[list[int]] = []
    numbers: dict[bytes, int] = {}
    answers = iter(range(-1, -(2**62), -1))  # no two answers share tokens
    for session, turns in enumerate(sessions):
        runs: list[tuple[int, int]] = []
        prompts = []
        tokens = 0
        for place, turn in enumerate(turns):
            runs += turn.delta
            tokens += sum(length for _, length in turn.delta)
            prompts.append(tokens)
            columns["arrival"].append(0 if arrivals_ns is None else int(arrivals_ns[session]))
            columns["prompt"].append(tokens)
            columns["output"].append(turn.output_tokens)
            columns["session"].append(session)
            columns["turn"].append(place)
            columns["delay"].append(turn.delay_ns)
            columns["quoted"].append(place + 1 < len(turns) and turn.output_tokens > 0)
            runs.append((next(answers), turn.output_tokens))
            tokens += turn.output_tokens
        if tokens > MAX_SESSION_TOKENS:
            raise InvalidArgument(
                f"session {session} has {tokens:,} tokens; at most {MAX_SESSION_TOKENS:,} are supported"
            )
        whole = _number_blocks(runs, prompts[-1], numbers)
        ids += [whole[: -(-prompt // BLOCK)] for prompt in prompts]
    return Workload(
        arrival_ns=np.array(columns["arrival"], np.int64),
        prompt_tokens=np.array(columns["prompt"], np.int64),
        output_tokens=np.array(columns["output"], np.int64),
        hash_offsets=np.cumsum([0, *map(len, ids)]),
        hash_ids=np.array([number for row in ids for number in row], np.uint32),
        trace_block_size=BLOCK,
        has_arrivals=arrivals_ns is not None or not sessions,
        session=np.array(columns["session"], np.int64),
        turn=np.array(columns["turn"], np.int64),
        delay_ns=np.array(columns["delay"], np.int64),
        output_in_next=np.array(columns["quoted"], np.bool_) if any(columns["quoted"]) else None,
    )


def _number_blocks(runs: Iterable[tuple[int, int]], tokens: int, numbers: dict[bytes, int]) -> list[int]:
    """Number the blocks of the first `tokens` tokens; blocks of equal content have equal numbers."""
    runs = list(runs)
    content = np.repeat([name for name, _ in runs], [length for _, length in runs])[:tokens].astype(np.int64)
    return [
        numbers.setdefault(content[start : start + BLOCK].tobytes(), len(numbers))
        for start in range(0, tokens, BLOCK)
    ]


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
