"""Growth in users, written from its definition in docs/replay.md: lines of a trace in, lines of a trace out."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]
"""A line of a Mooncake trace; every row has `input_length`, a first turn `timestamp`, a later one `delay`."""

MASK = 2**64 - 1
SIZE = 16
"""Tokens per hash id of the traces here."""


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random64(seed: int, stream: int, user: int) -> int:
    """Return the random number of a user: SplitMix64."""
    state = (seed + (stream * 2**32 + user + 1) * 0x9E3779B97F4A7C15) & MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
    return state ^ state >> 31


def users_by_session(rows: list[Row]) -> list[int]:
    """Return the user of each row: its session, in order of first appearance."""
    known: dict[str, int] = {}
    return [known.setdefault(row["session_id"], len(known)) for row in rows]


def users_by_prompt(rows: list[Row], size: int) -> list[int]:
    """Return the user of each row of a trace without sessions: that of the earlier request that it continues."""
    order = sorted(range(len(rows)), key=lambda at: rows[at]["timestamp"])
    ids = [tuple(row["hash_ids"]) for row in rows]
    lengths = [row["input_length"] for row in rows]

    def reaches(prefix: tuple[int, ...]) -> list[int]:
        return [at for at in order if ids[at][: len(prefix)] == prefix]

    goes_on = any(
        lengths[at] % size and any(lengths[other] > lengths[at] for other in reaches(ids[at]))
        for at in range(len(rows))
    )
    by_full_blocks = any(length % size for length in lengths) and not goes_on
    ends = [
        one[: length // size] if by_full_blocks else one for one, length in zip(ids, lengths, strict=True)
    ]

    def owns_its_end(at: int) -> bool:
        if not ends[at]:
            return False
        first, *others = reaches(ends[at])
        least = lengths[at] + 1
        if by_full_blocks:
            least = max(least, lengths[at] + rows[at]["output_length"])
        place = len(ends[at])
        following = {
            ids[other][place]
            for other in (first, *others)
            if len(ids[other]) > place and (not by_full_blocks or lengths[other] // size > place)
        }
        # A block may be full in one prompt and the last of another.
        if by_full_blocks:
            full = {ids[other][: place + 1] for other in order if lengths[other] // size > place}
            following = {block for block in following if (*ends[at], block) in full}
        return (
            first == at
            and all(lengths[other] >= least for other in others)
            and len(following) <= (1 if by_full_blocks else 8)
        )

    owners = [at for at in order if owns_its_end(at)]
    before = {}
    for at in order:
        continued = [one for one in owners if one != at and ids[at][: len(ends[one])] == ends[one]]
        before[at] = max(continued, key=lambda one: len(ends[one]), default=None)
    names: dict[int, int] = {}
    users = []
    for at in range(len(rows)):
        root = at
        while (earlier := before[root]) is not None:
            root = earlier
        users.append(names.setdefault(root, len(names)))
    return users


def grow(rows: list[Row], users: list[int], factor: float, seed: int = 0) -> list[Row]:
    """Return the rows of `factor` times as many users, sorted by the arrival of their sessions."""
    owners: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for row, user in zip(rows, users, strict=True):
        for place in range(len(row["hash_ids"])):
            owners[tuple(row["hash_ids"][: place + 1])].add(user)
    count = max(users) + 1
    begin: dict[object, int] = {}  # of the session, ns
    end: dict[object, int] = {}
    sessions = [row.get("session_id", at) for at, row in enumerate(rows)]
    for row, session in zip(rows, sessions, strict=True):
        begin.setdefault(session, round(row.get("timestamp", 0) * 1_000_000))
        end[session] = end.get(session, begin[session]) + round(row.get("delay", 0) * 1_000_000)
    longest = min(60 * 60_000_000_000, (max(end.values()) - min(begin.values())) // 20)
    total = round(count * factor)
    space = 1 + max(number for row in rows for number in row["hash_ids"])
    grown = []
    for copy in range(-(-total // count)):
        wanted = min(count, total - copy * count)
        chosen = sorted(range(count), key=lambda user: random64(seed, 2 * copy + 1, user))[:wanted]
        for at, (row, user) in enumerate(zip(rows, users, strict=True)):
            if user not in chosen:
                continue
            shift = random64(seed, 2 * copy, user) % (min(copy * 60_000_000_000, longest) + 1)
            arrival = begin[sessions[at]] + shift
            private = [
                len(owners[tuple(row["hash_ids"][: place + 1])]) == 1 for place in range(len(row["hash_ids"]))
            ]
            ids = [
                number + copy * space if own else number
                for number, own in zip(row["hash_ids"], private, strict=True)
            ]
            new = {**row, "hash_ids": ids}
            if "timestamp" in row:
                new["timestamp"] = arrival / 1e6
            if "session_id" in row and copy:
                new["session_id"] = f"{row['session_id']}#{copy}"
            grown.append((arrival, new))
    return [row for _, row in sorted(grown, key=lambda pair: pair[0])]


def agent_rows(sessions: int = 40, *, named: bool = True) -> list[Row]:
    """Return sessions of an agent: a shared system prompt of 8 blocks, prompts that grow, think times of seconds."""
    rng = np.random.default_rng(5)
    fresh = iter(range(1000, 10**6))
    rows: list[Row] = []
    for session in range(sessions):
        ids, time = list(range(8)), float(rng.integers(0, 60_000))
        for turn in range(int(rng.integers(4, 12))):
            ids = ids + [next(fresh) for _ in range(int(rng.integers(4, 12)))]
            row: Row = {"session_id": f"s{session}"} if named else {}
            wait = int(rng.integers(1_000, 6_000)) if turn else 0
            time += wait
            row |= {"delay": wait} if named and turn else {"timestamp": int(time)}
            length = SIZE * len(ids) - int(rng.integers(0, SIZE))
            rows.append(
                {**row, "input_length": length, "output_length": int(rng.integers(5, 40)), "hash_ids": ids}
            )
    return rows if named else sorted(rows, key=lambda row: row["timestamp"])
