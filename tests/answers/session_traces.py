"""Random traces of sessions that overlap, as rows of a file, and what their requests hold, by definition."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from random import Random

BLOCK = 4
"""Tokens per hash id, and per block of the caches."""
Row = dict[str, Any]
Block = tuple[Any, ...]


def random_sessions(rng: Random, *, times: str, sessions: int = 6) -> list[Row]:
    """Rows of sessions with shared first blocks; each prompt continues the one before, sometimes with its answer.

    `times`: all (a timestamp in every row), first (first turns only, later ones have a delay).
    """
    rows: list[Row] = []
    fresh = iter(range(1000, 10**6))
    for number in range(sessions):
        ids = [7, 8, 9][: rng.randint(0, 3)]
        now = rng.randint(0, 2000)
        for turn in range(rng.randint(1, 5)):
            ids = [*ids, *(next(fresh) for _ in range(rng.randint(1, 3)))]
            prompt = len(ids) * BLOCK - rng.randint(1, 3)  # ends inside a block
            output = rng.randint(1, 9)
            row: Row = {"input_length": prompt, "output_length": output, "hash_ids": ids, "at": now}
            row |= {"session_id": f"s{number}", "output_in_next_turn": False, "turn": turn}
            if times == "all" or not turn:
                row["timestamp"] = now
            else:
                row["delay"] = row["wait"] = rng.randint(0, 300)
            rows.append(row)
            now += rng.randint(0, 900)
            if rng.random() < 0.6:  # the next prompt continues with the tokens of this prompt and answer
                row["output_in_next_turn"] = True
                ids = ids + [next(fresh) for _ in range(-(-(prompt + output) // BLOCK) - len(ids))]
        rows[-1]["output_in_next_turn"] = False
    rows.sort(key=lambda row: row["at"])  # as a log is written
    return rows


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write the keys that a reader knows."""
    text = [json.dumps({key: row[key] for key in row if key not in ("at", "wait", "turn")}) for row in rows]
    path.write_text("\n".join(text) + "\n")
    return path


def next_rows(rows: Sequence[Row]) -> dict[int, int]:
    """Map each row with a later turn to the row of that turn."""
    last: dict[str, int] = {}
    following = {}
    for number, row in enumerate(rows):
        if row["session_id"] in last:
            following[last[row["session_id"]]] = number
        last[row["session_id"]] = number
    return following


def held_blocks(rows: Sequence[Row], number: int) -> list[Block]:
    """Blocks that a request has computed at its end, each named by all tokens up to its end."""
    row = rows[number]
    computed = row["input_length"] + row["output_length"] - 1  # the last token is never computed
    ids = row["hash_ids"]
    if row["output_in_next_turn"]:
        ids = rows[next_rows(rows)[number]]["hash_ids"]
        tokens: list[Any] = [one for one in ids for _ in range(BLOCK)]
    else:
        tokens = [one for one in ids for _ in range(BLOCK)][: row["input_length"]]
        tokens += [(number, place) for place in range(row["output_length"])]
    return [tuple(tokens[:end]) for end in range(BLOCK, computed + 1, BLOCK)]


def readable(row: Row) -> int:
    """Blocks of the prompt that a request may read; it computes at least one token."""
    return int((row["input_length"] - 1) // BLOCK)


def sent_ms(rows: Sequence[Row], answer_ms_per_token: int) -> list[float]:
    """Times at which requests are sent: timestamps, else the delay after the answer to the turn before."""
    times: list[float] = []
    last: dict[str, int] = {}
    for number, row in enumerate(rows):
        if "timestamp" in row:
            times.append(row["timestamp"])
        else:
            before = last[row["session_id"]]
            answered = times[before] + answer_ms_per_token * rows[before]["output_length"]
            times.append(answered + row["wait"])
        last[row["session_id"]] = number
    return times


def lru_hit_blocks(rows: Sequence[Row], order: Sequence[int], size: int) -> int:
    """Blocks that an LRU cache hits which serves one request after the other."""
    cache: OrderedDict[Block, None] = OrderedDict()
    hits = 0
    for number in order:
        blocks, found = held_blocks(rows, number), 0
        while found < readable(rows[number]) and blocks[found] in cache:
            found += 1
        hits += found
        for block in reversed(blocks):  # a request releases its last block first
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits
