"""Prefix caches as plain lists, from their definitions in docs/cache.md; no code of the product."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from answers.random_traces import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from answers.random_traces import Row

Block = tuple[Any, ...]
"""Name of a block: the adapter, and all tokens up to its end."""
ANSWER_MS_PER_TOKEN = 20
"""Time of an answer where a trace does not have it."""


@dataclass(frozen=True)
class Visit:
    """One request: the blocks that it has computed at its end, and how many of them, from the first, it may read."""

    prompt_tokens: int
    blocks: tuple[Block, ...]
    readable: int


def following_rows(rows: Sequence[Row]) -> dict[int, int]:
    """Map each row with a later turn to the row of that turn."""
    last: dict[str, int] = {}
    found = {}
    for number, row in enumerate(rows):
        session = row.get("session_id")
        if session is not None:
            if session in last:
                found[last[session]] = number
            last[session] = number
    return found


def output_tokens(row: Row) -> int:
    """Tokens of an answer: as many as the trace has, or fewer by its limit."""
    return int(min(row["output_length"], row.get("max_tokens", row["output_length"])))


def visits_of(rows: Sequence[Row], block_size: int) -> list[Visit]:
    """Describe every request of a trace whose hash ids have `BLOCK` tokens."""
    later = following_rows(rows)
    found = []
    for number, row in enumerate(rows):
        prompt, output = row["input_length"], output_tokens(row)
        tokens = spell(row["hash_ids"])[:prompt]
        if row.get("output_in_next_turn") and number in later:
            tokens += spell(rows[later[number]]["hash_ids"])[prompt : prompt + output]
        else:
            tokens += [(f"answer {number}", place) for place in range(output)]
        computed = prompt + output - 1  # the last token of an answer is never computed
        ends = range(block_size, computed + 1, block_size)
        blocks = tuple((row.get("lora"), *tokens[:end]) for end in ends)
        found.append(Visit(prompt, blocks, (prompt - 1) // block_size))  # one token at least is computed
    return found


def spell(ids: Sequence[int]) -> list[tuple[Any, int]]:
    """Name the tokens of a prompt by its hash ids."""
    return [(one, place) for one in ids for place in range(BLOCK)]


def times_sent(rows: Sequence[Row]) -> list[float]:
    """Times in ms: the timestamp of a first turn, else the delay after the answer to the turn before."""
    times: list[float] = []
    last: dict[str, int] = {}
    for number, row in enumerate(rows):
        session = row.get("session_id", f"row {number}")
        if session not in last:
            times.append(round(row["timestamp"] * 1e6))
        else:
            before = last[session]
            answered = times[before] + output_tokens(rows[before]) * ANSWER_MS_PER_TOKEN * 1e6
            times.append(answered + round(row.get("delay", 0) * 1e6))
        last[session] = number
    return times


def hits_of(visit: Visit, is_cached: Callable[[Block], bool]) -> int:
    """Blocks that a request finds: the longest run from its first."""
    found = 0
    while found < visit.readable and is_cached(visit.blocks[found]):
        found += 1
    return found


def lru_hits(visits: Sequence[Visit], size: int) -> list[int]:
    """Blocks that each request hits in an LRU cache; a request releases its last block first.

    A block that is computed although it is cached is a copy, as in vLLM: the older one stays until it leaves by itself.
    """
    cache: list[Block] = []  # released last at the end
    hits = []
    for visit in visits:
        found = hits_of(visit, cache.__contains__)
        hits.append(found)
        for place in reversed(range(len(visit.blocks))):
            block = visit.blocks[place]
            if place < found:
                del cache[len(cache) - 1 - cache[::-1].index(block)]  # the youngest copy is read
            cache.append(block)
        del cache[: max(len(cache) - size, 0)]
    return hits


def insertion_hits(visits: Sequence[Visit], size: int) -> list[int]:
    """Blocks that each request hits in a cache whose blocks leave in the order in which they were stored."""
    cache: OrderedDict[Block, None] = OrderedDict()
    hits = []
    for visit in visits:
        hits.append(hits_of(visit, cache.__contains__))
        for block in visit.blocks:
            if block not in cache:
                cache[block] = None
                if len(cache) > size:
                    cache.popitem(last=False)
    return hits


def optimal_hits(visits: Sequence[Visit], size: int) -> list[int]:
    """Blocks that each request hits in a cache that keeps the blocks that are read soonest, of all that it may keep."""
    reads: dict[Block, list[int]] = {}
    for number, visit in enumerate(visits):
        for block in visit.blocks[: visit.readable]:
            reads.setdefault(block, []).append(number)
    cache: set[Block] = set()
    hits = []
    for number, visit in enumerate(visits):
        hits.append(hits_of(visit, cache.__contains__))
        coming = {}
        for block in cache | set(visit.blocks):
            later = [when for when in reads.get(block, ()) if when > number]
            if later:
                coming[block] = (later[0], len(block))  # of one reader, the first blocks of its prompt
        cache = set(sorted(coming, key=coming.__getitem__)[:size])
    return hits


POLICIES: dict[str, Callable[[Sequence[Visit], int], list[int]]] = {
    "lru": lru_hits,
    "insertion": insertion_hits,
    "optimal": optimal_hits,
}


def open_blocks(rows: Sequence[Row], visits: Sequence[Visit], order: Sequence[int]) -> int:
    """Most distinct blocks that sessions have visited which are between their first and last request."""
    sessions = [row.get("session_id", f"row {number}") for number, row in enumerate(rows)]
    ends = {sessions[number]: place for place, number in enumerate(order)}
    most = 0
    for now in range(len(order)):
        held = {
            block
            for other in order[: now + 1]
            if ends[sessions[other]] >= now
            for block in visits[other].blocks
        }
        most = max(most, len(held))
    return most
