"""Shrink a failing case: drop rows and flags while the same audit still objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from answers.random_cases import Case
    from answers.random_traces import Row

_KEPT = (
    "trace-block-size",
    "block-size",
    "model",
    "gpu",
    "engine",
    "prefill-workers",
    "decode-workers",
    "set",
)


def shrink(case: Case, fails: Callable[[Case], bool], *, tries: int = 150) -> Case:
    """Return a smaller case that `fails` too, after at most so many tries."""
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _candidates(case):
            left -= 1
            if fails(candidate):
                case, smaller = candidate, True
                break
            if left == 0:
                break
    return case


def _candidates(case: Case) -> list[Case]:
    """Cases with fewer sessions, rows, flags, and tokens; those that drop most come first."""
    sessions = list(dict.fromkeys(_session(number, row) for number, row in enumerate(case.rows)))
    found = []
    size = len(sessions) // 2
    while size:
        for begin in range(0, len(sessions), size):
            dropped = set(sessions[begin : begin + size])
            kept = [row for number, row in enumerate(case.rows) if _session(number, row) not in dropped]
            if kept:
                found.append(replace(case, rows=tuple(kept)))
        size //= 2
    found += [case.with_flags(**{name: None}) for name in case.flags if name not in _KEPT]
    found += [_without_last_turn(case, session) for session in sessions]
    return [candidate for candidate in found if candidate.rows]


def _session(number: int, row: Row) -> str:
    return str(row.get("session_id", f"row {number}"))


def _without_last_turn(case: Case, session: str) -> Case:
    mine = [number for number, row in enumerate(case.rows) if _session(number, row) == session]
    rows = [dict(row) for number, row in enumerate(case.rows) if number != mine[-1]]
    last = [row for row in rows if len(mine) > 1 and row.get("session_id") == session]
    if last:
        last[-1].pop("output_in_next_turn", None)
    return replace(case, rows=tuple(rows))
