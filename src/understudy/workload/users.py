"""Scale a workload by its users: copy or sample whole users, each copy with content of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from understudy.checks import positive_number, whole_number
from understudy.errors import ConfigError
from understudy.workload.arrivals import ClosedLoop
from understudy.workload.columns import next_turn_rows
from understudy.workload.combine import concat
from understudy.workload.user_prefixes import find_user_content

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import BoolColumn, UInt32Column
    from understudy.workload.user_prefixes import UserContent
    from understudy.workload.workload import Workload

SHIFT_NS = 60_000_000_000
"""Copy k arrives at most k times this later than its user, so that many copies do not arrive in bursts."""
MOST_SHIFTS = 60
SHIFT_PARTS = 20
"""No copy arrives later than MOST_SHIFTS times SHIFT_NS, or 1 / SHIFT_PARTS of the trace's length."""


def scale_users(workload: Workload, users: float, *, seed: int = 0) -> Workload:
    """Return the workload of `users` times as many users; rows are sorted by arrival.

    Users are plays, sessions, or found by their prompts (`find_user_content`). Of n users, round(n · users) are kept:
    each floor(users) times, and a random sample once more. A larger `users` adds to those of a smaller one. A copy
    keeps lengths, turns, delays and the blocks that several users share; all blocks that only this user has get new
    ids. All requests of copy k arrive later by one random time of at most k minutes, an hour, and a twentieth of the
    time that the trace plans. Names of copies end in `#1`, `#2`, …; 1 returns the workload itself.

    docs/replay.md defines shifts and samples exactly. Errors: ConfigError for a `users` or `seed` out of range, if no
    user would be left, or if there would be too many requests or block ids.
    """
    check_users(users)
    seed = whole_number("seed", seed, 0, 2**64 - 1)
    if users == 1 or not len(workload):
        return workload
    space = workload.token_space
    most = min((2**31 - 1) // len(workload), 2**32 // max(space, 1))
    if users > most:
        raise ConfigError(
            f"users: {users:g} times {len(workload):,} requests with {space:,} block ids are too many; give at most "
            f"{most:,}"
        )
    content = find_user_content(workload)
    total = round(content.count * users)
    if not total:
        raise ConfigError(
            f"users: {users:g} times {content.count:,} users is none; give at least {1 / content.count:.2g}"
        )
    copies = -(-total // content.count)
    longest_shift_ns = _longest_shift_ns(workload, copies - 1)
    parts, places = [], []
    for copy in range(copies):
        chosen = _sample(content.count, min(total - copy * content.count, content.count), seed, copy)
        part = (
            _copy(workload, content, copy, seed, min(copy * SHIFT_NS, longest_shift_ns)) if copy else workload
        )
        rows = np.flatnonzero(chosen[content.user])
        parts.append(part if len(rows) == len(workload) else part.take(rows))
        places.append(rows)
    scaled = parts[0] if len(parts) == 1 else concat(parts, shared_prefixes=True)
    if workload.has_arrivals:
        scaled = scaled.sorted_by_arrival()
    elif len(parts) > 1:
        scaled = scaled.take(np.argsort(np.concatenate(places), kind="stable"))
    note = _describe(users, total, content, longest_shift_ns)
    return replace(scaled, users=workload.users * users, notes=(*workload.notes, note))


def check_users(users: float) -> None:
    """Raise ConfigError unless `users` is a finite number above 0."""
    positive_number("users", users, remedy="1 is the trace as it is, 2 twice its users, 0.5 half of them")


def check_load(users: float, load: object) -> None:
    """Raise ConfigError if users are scaled under a closed loop, whose load is its number of sessions."""
    if users != 1 and isinstance(load, ClosedLoop):
        raise ConfigError(
            f"users={users:g} contradicts concurrency: the load of a closed loop is its number of sessions at a time, "
            "however many users follow; give a larger concurrency instead"
        )


def _copy(workload: Workload, content: UserContent, copy: int, seed: int, longest_shift_ns: int) -> Workload:
    """Return all rows as those of other users: with ids, names and arrivals of their own."""
    base = np.uint32(copy * workload.token_space)
    hash_ids = np.where(content.private, workload.hash_ids + base, workload.hash_ids)
    outputs, graph = workload.output_token_ids, workload.graph
    shift_ns = _mix(seed, 2 * copy, content.count) % np.uint64(longest_shift_ns + 1)
    return replace(
        workload,
        arrival_ns=workload.arrival_ns + shift_ns.astype(np.int64)[content.user],
        hash_ids=hash_ids,
        output_token_ids=None if outputs is None else _rename_outputs(workload, content, base),
        request_ids=_rename(workload.request_ids, copy),
        session_ids=_rename(workload.session_ids, copy),
        graph=None if graph is None else replace(graph, play_ids=_rename(graph.play_ids, copy)),
    )


def _longest_shift_ns(workload: Workload, copies: int) -> int:
    """Return the most that any of `copies` is shifted; 0 without arrivals.

    The length of a trace is the time from its first arrival to the last turn, by the delays alone; with a graph, to
    the last of the earliest times.
    """
    if not workload.has_arrivals:
        return 0
    most_ns = min(copies, MOST_SHIFTS) * SHIFT_NS * SHIFT_PARTS
    if workload.graph is not None:
        last = np.minimum(workload.graph.not_before_ns, most_ns).max(initial=0)
        spread = int(workload.arrival_ns.max()) - int(workload.arrival_ns.min())
        return min(spread + int(last), most_ns) // SHIFT_PARTS
    last_ns = workload.arrival_ns[workload.turn == 0]
    np.add.at(last_ns, workload.session, np.minimum(workload.delay_ns, most_ns))  # longer ones change nothing
    return min(int(last_ns.max()) - int(workload.arrival_ns.min()), most_ns) // SHIFT_PARTS


def _rename_outputs(workload: Workload, content: UserContent, base: np.uint32) -> UInt32Column:
    """Rename exact outputs, except tokens that the next turn quotes in a block that several users share."""
    offsets, ids = workload.output_token_offsets, workload.output_token_ids
    assert offsets is not None
    assert ids is not None
    counts = np.diff(offsets)
    row = np.repeat(np.arange(len(workload)), counts)
    following = next_turn_rows(workload.session)[row]
    place = workload.prompt_tokens[row] + np.arange(len(ids)) - offsets[:-1][row]
    block = workload.hash_offsets[following] + place // workload.trace_block_size
    is_quoted = (following >= 0) & (block < workload.hash_offsets[following + 1])
    block = np.where(is_quoted, block, 0)
    is_shared = is_quoted & ~content.private[block] & (workload.hash_ids[block] == ids)
    return np.where(is_shared, ids, ids + base)


def _rename(names: list[str] | None, copy: int) -> list[str] | None:
    """Append `#copy` to the names, with more `#` if a name would be taken."""
    if names is None:
        return None
    known, mark = set(names), "#"
    while not known.isdisjoint(renamed := [f"{name}{mark}{copy}" for name in names]):
        mark += "#"
    return renamed


def _sample(count: int, wanted: int, seed: int, copy: int) -> BoolColumn:
    """Choose `wanted` of `count` users: those with the smallest random numbers."""
    chosen = np.ones(count, np.bool_)
    if wanted < count:
        chosen[np.argsort(_mix(seed, 2 * copy + 1, count), kind="stable")[wanted:]] = False
    return chosen


def _mix(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Return the random numbers of users 0 … count − 1: SplitMix64 of seed + (stream · 2^32 + user + 1) · golden."""
    first = (stream << 32) + 1
    state = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _describe(users: float, total: int, content: UserContent, longest_shift_ns: int) -> str:
    kind = (
        "sessions"
        if content.are_sessions
        else "users (the trace has no session ids: a request that continues a whole earlier prompt is of its user)"
    )
    if users < 1:
        return f"{users:g} times the users: a sample of {total:,} of {content.count:,} {kind}"
    shift = f", each copy up to {longest_shift_ns / 1e9:.3g} s later" if longest_shift_ns else ""
    return (
        f"{users:g} times the users: {total:,} in place of {content.count:,} {kind}{shift}; blocks that several share "
        "stay shared, all others are private to a copy"
    )
