"""Find the sessions of a request log: by ids, or because one prompt extends another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.workload.columns import BoolColumn, Int32Column, Int64Column

ASSISTANT = "\n<assistant>\n"
"""Start of a message that an assistant wrote, in the text of a prompt."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line of a log, with what it says about its session."""

    parts: tuple[str, ...] | str
    """Messages with their roles, after the tools; or the text of a completion."""
    answer: str
    """Text of the answer; empty if the log lacks it."""
    session_id: str | None
    start_ns: int | None
    end_ns: int | None
    is_short: bool
    """Whether the prompt is shorter than one block, so that extending it proves little."""


@dataclass(frozen=True, slots=True)
class LogSessions:
    """Sessions of a log's rows, as columns of a workload."""

    session: Int32Column
    turn: Int32Column
    delay_ns: Int64Column
    first: Int64Column
    """Row of the session's first turn."""
    repeats_answer: BoolColumn
    """Whether the next turn's prompt is this prompt, an answer, and more."""
    names: list[str] | None
    """Ids of the sessions, where the log has them."""
    notes: tuple[str, ...]


def find_sessions(requests: Sequence[LoggedRequest]) -> LogSessions:
    """Group requests, sorted by time, into sessions: by ids if the log has any, else by prompts.

    A turn's think time is the time since the end of the turn before, or since its start where the log has no end.
    """
    has_ids = any(request.session_id is not None for request in requests)
    before = _turns_before_by_id(requests) if has_ids else _turns_before_by_prompt(requests)
    count = len(requests)
    session, turn = np.zeros(count, np.int32), np.zeros(count, np.int32)
    delay_ns, first = np.zeros(count, np.int64), np.zeros(count, np.int64)
    repeats_answer = np.zeros(count, np.bool_)
    starts: list[int] = []
    overlapping = unknown_ends = 0
    for row, previous in enumerate(before):
        if previous is None:
            session[row], first[row] = len(starts), row
            starts.append(row)
            continue
        session[row], first[row] = session[previous], first[previous]
        turn[row] = turn[previous] + 1
        repeats_answer[previous] = _repeats_answer(requests[previous], requests[row])
        start, end = requests[row].start_ns, requests[previous].end_ns
        if start is None:
            continue
        unknown_ends += end is None
        waited = start - (requests[previous].start_ns or 0 if end is None else end)
        overlapping += waited < 0
        delay_ns[row] = max(0, waited)
    later = count - len(starts)
    notes = []
    if later:
        how = "by the log's session ids" if has_ids else "by prompts that extend one another"
        notes.append(
            f"{later:,} of {count:,} requests continue an earlier one ({how}) and wait for its answer"
        )
    if unknown_ends:
        notes.append("the log has no end times: think times include the time of the answer before")
    if overlapping:
        notes.append(f"{overlapping:,} turns began before the turn before them ended; they run one by one")
    names = [requests[row].session_id or f"request_{row}" for row in starts] if has_ids else None
    return LogSessions(session, turn, delay_ns, first, repeats_answer, names, tuple(notes))


def _turns_before_by_id(requests: Sequence[LoggedRequest]) -> list[int | None]:
    last: dict[str, int] = {}
    before: list[int | None] = []
    for row, request in enumerate(requests):
        before.append(None if request.session_id is None else last.get(request.session_id))
        if request.session_id is not None:
            last[request.session_id] = row
    return before


class _Prompt:
    """A prompt, the longest prompt of the log that it extends, and the requests that no turn follows yet."""

    def __init__(self, parts: tuple[str, ...] | str, shorter: _Prompt | None) -> None:
        self.parts = parts
        self.shorter = shorter
        self.open: list[int] = []


def _turns_before_by_prompt(requests: Sequence[LoggedRequest]) -> list[int | None]:
    prompts = {
        **_arrange(request.parts for request in requests if isinstance(request.parts, str)),
        **_arrange(request.parts for request in requests if not isinstance(request.parts, str)),
    }
    before: list[int | None] = []
    for row, request in enumerate(requests):
        prompt: _Prompt | None = prompts[request.parts]
        found = None
        while found is None and (prompt := prompt.shorter if prompt else None):
            found = next((one for one in reversed(prompt.open) if _continues(request, requests[one])), None)
            if found is not None:
                prompt.open.remove(found)
        before.append(found)
        prompts[request.parts].open.append(row)
    return before


def _arrange(prompts: Iterable[str | tuple[str, ...]]) -> dict[str | tuple[str, ...], _Prompt]:
    """Link each prompt to the longest one that it extends; in sorted order, such prompts come just before."""
    found: dict[str | tuple[str, ...], _Prompt] = {}
    above: _Prompt | None = None
    for parts in sorted(set(prompts), key=tuple):
        while above is not None and parts[: len(above.parts)] != above.parts:
            above = above.shorter
        above = found[parts] = _Prompt(parts, above)
    return found


def _continues(request: LoggedRequest, earlier: LoggedRequest) -> bool:
    """Whether the earlier request can be the turn before: over by then, with the answer that is repeated."""
    if earlier.end_ns is not None and request.start_ns is not None and earlier.end_ns > request.start_ns:
        return False
    if isinstance(request.parts, str):
        added = request.parts[len(earlier.parts) :]
        return added.startswith(earlier.answer) if earlier.answer else not earlier.is_short
    added = request.parts[len(earlier.parts)]
    if not earlier.answer or not added.startswith(ASSISTANT):
        return True
    return earlier.answer.strip().endswith(added.removeprefix(ASSISTANT).strip())  # thoughts may be dropped


def _repeats_answer(earlier: LoggedRequest, later: LoggedRequest) -> bool:
    size = len(earlier.parts)
    if len(later.parts) <= size or later.parts[:size] != earlier.parts:
        return False
    added = later.parts[size]
    return isinstance(later.parts, str) or added.startswith(ASSISTANT)
