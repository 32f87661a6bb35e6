"""What prefix caching could bring at most: the hits of a cache that forgets nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from understudy.workload.columns import Int64Column
    from understudy.workload.workload import Workload


def unlimited_hit_tokens(workload: Workload, block_size: int) -> Int64Column:
    """Prompt tokens of each row, in whole blocks, that an earlier row's prompt had as its beginning too.

    Rows follow each other as they arrive; every request finds all prompts before it. Outputs are not counted, so that
    sessions that quote their answers may find more; and so may prompts that part within a block of the trace.
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


def unlimited_hit_ratio(workload: Workload, block_size: int) -> float:
    """The same as a share of all prompt tokens."""
    return int(unlimited_hit_tokens(workload, block_size).sum()) / max(workload.total_prompt_tokens, 1)
