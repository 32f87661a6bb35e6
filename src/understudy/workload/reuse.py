"""Upper bounds on prefix-cache hits: an unlimited cache, and one LRU cache of every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import BlockVisits

if TYPE_CHECKING:
    from understudy.workload.columns import Int32Column, Int64Column
    from understudy.workload.workload import Workload


def unlimited_hit_tokens(
    workload: Workload, block_size: int, worker: Int32Column | None = None
) -> Int64Column:
    """Count the prompt tokens of each row, in whole blocks, that are a prefix of an earlier row's prompt.

    Rows are taken in arrival order; a request can hit the prompts of all earlier requests, or of those on its own
    `worker`. Outputs are not counted, so sessions that repeat their answers may hit more; so may prompts that differ
    first inside a block of the trace.
    """
    order = workload.arrival_order() if workload.has_arrivals else None
    rows = np.arange(len(workload)) if order is None else order
    starts = workload.hash_offsets[:-1][rows]
    counts = np.diff(workload.hash_offsets)[rows]
    prompt = workload.prompt_tokens[rows].astype(np.int64)
    size = workload.trace_block_size
    shared = np.zeros(len(rows), np.int64)
    # Rows, as indices in arrival order, that have more blocks and whose prefix another row shares so far.
    live = np.flatnonzero(counts > 0)
    prefix = np.zeros(len(live), np.int64)
    for partition in (workload.adapter, worker):  # other adapters and other workers share no blocks
        if partition is not None:
            prefix = np.unique(
                prefix << 32 | partition[rows[live]].astype(np.int64) + 1, return_inverse=True
            )[1]
    position = 0
    while len(live):
        ids = workload.hash_ids[starts[live] + position].astype(np.int64)
        # A block is identified by its id, its prefix and, if it is not full, its length.
        known = np.unique((prefix << 32) | ids, return_inverse=True)[1].astype(np.int64)
        used = np.minimum(prompt[live] - position * size, size)
        _, first, number = np.unique(known * (size + 1) + used, return_index=True, return_inverse=True)
        seen = first[number] < np.arange(len(live))
        shared[live[seen]] = position + 1
        # A row whose prefix no other row has neither hits nor serves further hits.
        several = np.bincount(number)[number] > 1
        position += 1
        keep = several & (counts[live] > position)
        live, prefix = live[keep], number[keep]
    hits = np.empty(len(rows), np.int64)
    # At least one token of a prompt is always computed.
    hits[rows] = np.minimum(shared * size, prompt - 1) // block_size * block_size
    return hits


def unlimited_hit_ratio(workload: Workload, block_size: int, worker: Int32Column | None = None) -> float:
    """Return `unlimited_hit_tokens` as a share of all prompt tokens."""
    return int(unlimited_hit_tokens(workload, block_size, worker).sum()) / max(
        workload.total_prompt_tokens, 1
    )


@dataclass(frozen=True, eq=False, slots=True)
class HitCurve:
    """Hit ratio by cache size, for one LRU cache that serves the requests one at a time in arrival order."""

    hit_tokens: Int64Column
    """Prompt tokens that hit, by cache size in blocks from 0; larger caches hit as many as the last."""
    block_size: int
    prompt_tokens: int
    smallest_blocks: int
    """Blocks of the largest request; a smaller cache cannot serve it."""
    distinct_blocks: int
    """Blocks of an unlimited cache at the end."""

    def hit_ratio(self, blocks: int) -> float:
        """Return the share of prompt tokens that hit in a cache of `blocks`."""
        return int(self.hit_tokens[min(blocks, len(self.hit_tokens) - 1)]) / max(self.prompt_tokens, 1)

    @property
    def unlimited_hit_ratio(self) -> float:
        """Share of prompt tokens that hit in an unlimited cache."""
        return self.hit_ratio(self.distinct_blocks)


def hit_curve(workload: Workload, block_size: int) -> HitCurve:
    """Compute the hit curve in one pass over the requests in arrival order, outputs included.

    The curve equals one vLLM engine that runs one request at a time, to within one block of cache size (a request's
    last, partly filled block occupies a place while it runs), plus one block for each fully cached prompt of whole
    blocks: its last block is computed again, and the engine keeps using the older copy. Overlapping requests, and
    several workers that each see a part, hit less or more.
    """
    hit_tokens, distinct = BlockVisits(workload, block_size).lru(serving_order(workload))
    return HitCurve(
        hit_tokens=hit_tokens,
        block_size=block_size,
        prompt_tokens=workload.total_prompt_tokens,
        smallest_blocks=largest_request_blocks(workload, block_size),
        distinct_blocks=distinct,
    )


def serving_order(workload: Workload) -> Int64Column:
    """Return the rows in arrival order; in row order if the workload has no arrivals."""
    order = workload.arrival_order() if workload.has_arrivals else None
    return np.arange(len(workload), dtype=np.int64) if order is None else order


def largest_request_blocks(workload: Workload, block_size: int) -> int:
    """Return the blocks that the largest request holds at its end; the last token's KV is never computed."""
    computed = workload.prompt_tokens.astype(np.int64) + np.maximum(workload.cut_output_tokens - 1, 0)
    return int((-(-computed // block_size)).max(initial=0))
