"""What prefix caching could bring: the hits of a cache that forgets nothing, and of LRU caches of every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import ReuseStack
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from understudy.workload.columns import Int32Column, Int64Column
    from understudy.workload.workload import Workload


def unlimited_hit_tokens(
    workload: Workload, block_size: int, worker: Int32Column | None = None
) -> Int64Column:
    """Prompt tokens of each row, in whole blocks, that an earlier row's prompt had as its beginning too.

    Rows follow each other as they arrive; every request finds all prompts before it, or those that went to its own
    `worker`. Outputs are not counted, so that sessions that quote their answers may find more; and so may prompts that
    part within a block of the trace.
    """
    order = workload.arrival_order() if workload.has_arrivals else None
    rows = np.arange(len(workload)) if order is None else order
    starts = workload.hash_offsets[:-1][rows]
    counts = np.diff(workload.hash_offsets)[rows]
    prompt = workload.prompt_tokens[rows].astype(np.int64)
    size = workload.trace_block_size
    shared = np.zeros(len(rows), np.int64)
    live = np.flatnonzero(
        counts > 0
    )  # places in the order of arrival whose prompt goes on, and was shared so far
    prefix = np.zeros(len(live), np.int64)
    for apart in (workload.adapter, worker):  # under another adapter, or elsewhere, nothing is alike
        if apart is not None:
            prefix = np.unique(prefix << 32 | apart[rows[live]].astype(np.int64) + 1, return_inverse=True)[1]
    position = 0
    while len(live):
        ids = workload.hash_ids[starts[live] + position].astype(np.int64)
        # A block is known by its id, by all before it and, if it is not full, by its length.
        known = np.unique((prefix << 32) | ids, return_inverse=True)[1].astype(np.int64)
        used = np.minimum(prompt[live] - position * size, size)
        _, first, number = np.unique(known * (size + 1) + used, return_index=True, return_inverse=True)
        seen = first[number] < np.arange(len(live))
        shared[live[seen]] = position + 1
        # Alone with its prefix, a row finds nothing more and shows nothing to others.
        several = np.bincount(number)[number] > 1
        position += 1
        keep = several & (counts[live] > position)
        live, prefix = live[keep], number[keep]
    hits = np.empty(len(rows), np.int64)
    hits[rows] = (
        np.minimum(shared * size, prompt - 1) // block_size * block_size
    )  # one token is always computed
    return hits


def unlimited_hit_ratio(workload: Workload, block_size: int, worker: Int32Column | None = None) -> float:
    """The same as a share of all prompt tokens."""
    return int(unlimited_hit_tokens(workload, block_size, worker).sum()) / max(
        workload.total_prompt_tokens, 1
    )


@dataclass(frozen=True, eq=False, slots=True)
class HitCurve:
    """Hit ratio against cache size, for one LRU cache that serves the requests in order, one after the other."""

    depths: Int64Column
    """Of every block that was found, ascending: the smallest cache, in blocks, that has it."""
    block_size: int
    prompt_tokens: int
    smallest_blocks: int
    """What the largest request needs: no smaller cache can serve it."""
    distinct_blocks: int
    """What a cache without limits holds at the end."""

    def hit_ratio(self, blocks: int) -> float:
        """Share of prompt tokens that a cache of `blocks` finds."""
        found = int(np.searchsorted(self.depths, blocks, side="right"))
        return found * self.block_size / max(self.prompt_tokens, 1)

    @property
    def unlimited_hit_ratio(self) -> float:
        """Share of prompt tokens that a cache without limits finds."""
        return self.hit_ratio(self.distinct_blocks)


def hit_curve(workload: Workload, block_size: int) -> HitCurve:
    """One pass over the requests as they arrive, each served whole before the next, outputs included.

    That is what one vLLM engine finds when it runs one request at a time, to within one block of size (the last,
    partly filled block of a request is forgotten first, but takes a place while it runs), and one more for each prompt
    of whole blocks that is all there: its last block is computed again, and of two copies the engine uses the older.
    Requests that overlap, and workers that each see a part, find less or more.
    """
    order = workload.arrival_order() if workload.has_arrivals else None
    stack = ReuseStack()
    smallest = 0
    for row in (np.arange(len(workload)) if order is None else order).tolist():
        prompt, output = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
        if workload.max_tokens is not None and workload.max_tokens[row] >= 0:
            output = min(output, int(workload.max_tokens[row]))
        computed = prompt + max(output - 1, 0)  # of the last token nothing is kept
        known = prompt if workload.known_output_tokens(row) is None else computed
        identities = row_identities(workload, row, block_size, min(known, computed) // block_size)
        stack.serve(identities, (prompt - 1) // block_size, computed // block_size)
        smallest = max(smallest, -(-computed // block_size))
    return HitCurve(
        depths=np.sort(stack.depths()).astype(np.int64),
        block_size=block_size,
        prompt_tokens=workload.total_prompt_tokens,
        smallest_blocks=smallest,
        distinct_blocks=len(stack),
    )
