"""Hit ratios by cache size: one LRU cache of every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import BlockVisits
from understudy.workload.time_order import time_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.workload.columns import Int64Column
    from understudy.workload.workload import Workload


@dataclass(frozen=True, eq=False, slots=True)
class HitCurve:
    """Hit ratio by cache size, for LRU caches: one, or one of each worker."""

    hit_tokens: Int64Column
    """Prompt tokens that hit, by blocks of a cache from 0; larger caches hit as many as the last."""
    block_size: int
    prompt_tokens: int
    smallest_blocks: int
    """Blocks of the largest request; a smaller cache cannot serve it."""
    distinct_blocks: int
    """Blocks of an unlimited cache at the end; with several caches, of the fullest one."""

    def hit_ratio(self, blocks: int) -> float:
        """Return the share of prompt tokens that hit in caches of `blocks`."""
        return int(self.hit_tokens[min(blocks, len(self.hit_tokens) - 1)]) / max(self.prompt_tokens, 1)

    @property
    def unlimited_hit_ratio(self) -> float:
        """Share of prompt tokens that hit in unlimited caches."""
        return int(self.hit_tokens[-1]) / max(self.prompt_tokens, 1)


def hit_curve(workload: Workload, block_size: int) -> HitCurve:
    """Compute the hit curve of one cache that serves the requests in the order in which they are sent, with outputs.

    The curve equals one vLLM engine that runs one request at a time, to within one block of cache size (a request's
    last, partly filled block occupies a place while it runs), plus one block for each fully cached prompt of whole
    blocks: its last block is computed again, and the engine keeps using the older copy. Overlapping requests, and
    several workers that each see a part, hit less or more.
    """
    hit_tokens, distinct = BlockVisits(workload, block_size).lru(time_order(workload))
    return HitCurve(
        hit_tokens=hit_tokens,
        block_size=block_size,
        prompt_tokens=workload.total_prompt_tokens,
        smallest_blocks=largest_request_blocks(workload, block_size),
        distinct_blocks=distinct,
    )


def sum_curves(curves: Sequence[Int64Column]) -> Int64Column:
    """Add up the hit tokens of several caches by their size; a curve stays at its last value."""
    total = np.zeros(max(map(len, curves), default=1), np.int64)
    for curve in curves:
        total += np.pad(curve, (0, len(total) - len(curve)), mode="edge")
    return total


def largest_request_blocks(workload: Workload, block_size: int) -> int:
    """Return the blocks that the largest request holds at its end; the last token's KV is never computed."""
    computed = workload.prompt_tokens.astype(np.int64) + np.maximum(workload.cut_output_tokens - 1, 0)
    return int((-(-computed // block_size)).max(initial=0))
