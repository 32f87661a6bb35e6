"""Hit ratios of a workload by cache size, for the policies of the engines' pools and for bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import BlockVisits
from understudy.checks import share
from understudy.errors import ConfigError
from understudy.kv.policy import BUILT_IN_POLICIES
from understudy.run.admissions import LastTokens, admission_order
from understudy.workload.reuse import sum_curves
from understudy.workload.time_order import time_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload
    from understudy.workload.columns import Int32Column, Int64Column

POLICIES = (*BUILT_IN_POLICIES, "insertion", "optimal")
"""Names of a replay's `eviction_policy`, and two that no engine has."""
DEFAULT_POLICIES = ("lru", "insertion", "lineage", "multi_lru", "optimal")
_VLLM = LastTokens()
PINNED = "optimal_pinned"
"""Optimal eviction where running requests hold their blocks."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Requests that share one cache."""

    worker: int
    rows: Int64Column
    """In the order in which they begin."""
    events: Int64Column
    """Begins (row) and ends (−1 − row) in the order of time."""
    warm_up: int
    """Number of first rows whose hits are not counted."""


class CacheCurves:
    """Hit ratios of caches of every size that serve a workload.

    Without `run`, one cache serves the requests one at a time, in the order in which they are sent (`time_order`), so
    that sessions overlap as they did. With the timeline of a `run`, each worker has a cache and serves its requests in
    the order and with the overlap of that run.
    """

    def __init__(
        self,
        workload: Workload,
        block_size: int,
        *,
        prompts_only: bool = False,
        warm_up: float = 0.0,
        run: Timeline | None = None,
        visits: BlockVisits | None = None,
        last: LastTokens = _VLLM,
    ) -> None:
        """Number the workload's blocks, or take their numbers from `visits`, of the same workload and settings.

        `prompts_only` counts prompts with their partly filled last block, not outputs, and lets a request read all of
        its blocks. `warm_up` is the share of requests, from the first, that fill the caches without being counted.
        `last` are the rules of the engine of `run` for last blocks, as in its report.
        Errors: ConfigError unless 0 ≤ `warm_up` < 1; InvalidArgument for 2^32 block visits or more.
        """
        share("warm_up", warm_up, or_zero=True, or_one=False, remedy="0.5 skips the first half")
        self.block_size = block_size
        if visits is None:
            whole = last.number_blocks
            visits = BlockVisits(workload, block_size, True) if prompts_only else whole(workload, block_size)
        self.visits = visits
        self._last = last
        self.is_serial = run is None
        self.rows = time_order(workload) if run is None else admission_order(run)
        """Rows of all parts in the order in which they begin."""
        self.events = _serial_events(self.rows) if run is None else _order_events(run, self.rows)
        """Begins (row) and ends (−1 − row) of all parts in the order of time."""
        self.worker = np.zeros(len(self.rows), np.int32) if run is None else run.worker[self.rows]
        """Worker, and so cache, of each of `rows`."""
        self.warm_up = int(warm_up * len(self.rows))
        """Number of first rows whose hits are not counted."""
        self.parts = list(self._split())
        self.prompt_tokens = int(workload.prompt_tokens[self.rows[self.warm_up :]].sum(dtype=np.int64))

    def _split(self) -> Iterator[Part]:
        """Yield the requests of each worker that has any."""
        if not len(self.rows) or not self.worker.any():
            yield Part(0, self.rows, self.events, self.warm_up)
            return
        row_of = np.where(self.events < 0, ~self.events, self.events)
        worker_of = np.empty(int(self.rows.max()) + 1, np.int32)
        worker_of[self.rows] = self.worker
        for own, events in zip(_group(self.worker), _group(worker_of[row_of]), strict=True):
            worker, warm_up = int(self.worker[own[0]]), int(np.searchsorted(own, self.warm_up))
            yield Part(worker, self.rows[own], self.events[events], warm_up)

    @cached_property
    def lru_hit_tokens(self) -> Int64Column:
        """Prompt tokens that hit in LRU caches, by blocks of each cache from 0, summed over the caches."""
        return sum_curves([self.visits.lru(part.rows, part.warm_up)[0] for part in self.parts])

    @cached_property
    def unlimited_hit_ratio(self) -> float:
        """Share of prompt tokens that one unlimited cache of all requests hits."""
        hits = self._last.unlimited_hits(self.visits, self.rows)[self.warm_up :]
        return int(hits.sum()) / max(self.prompt_tokens, 1)

    @cached_property
    def routed_hit_ratio(self) -> float:
        """Share of prompt tokens that unlimited caches hit, one of each worker: the end of the LRU curve."""
        hits = self._last.unlimited_hits(self.visits, self.rows, self.worker)[self.warm_up :]
        return int(hits.sum()) / max(self.prompt_tokens, 1)

    def shared_below_hit_ratio(self, blocks: int, below: int, *, copies: bool) -> float:
        """Return the hit ratio of LRU caches of `blocks`, one of each worker, above one of `below` that all share.

        `copies`: the shared cache also keeps the blocks of the caches above it; else a block that is read moves up.
        """
        if len(self.parts) == 1:  # the same, and faster
            return float(self.hit_ratio("lru", [max(blocks, below) if copies else blocks + below])[0])
        hits = self.visits.shared_below(self.rows, self.worker, blocks, below, copies, self.warm_up)
        return hits / max(self.prompt_tokens, 1)

    def hit_ratio(self, policy: str, blocks: Sequence[int] | Int64Column) -> NDArray[np.float64]:
        """Return the share of prompt tokens that hit in caches of these sizes. ConfigError for an unknown policy."""
        sizes = np.minimum(np.asarray(blocks, np.int64), 2**32 - 1)
        # One request at a time, the block released first is always a leaf, so lineage evicts as LRU does.
        if policy == "lru" or (policy == "lineage" and self.is_serial):
            tokens = self.lru_hit_tokens[np.minimum(sizes, len(self.lru_hit_tokens) - 1)]
        else:
            tokens = np.sum([self._hit_tokens(policy, part, sizes) for part in self.parts], axis=0)
        ratios: NDArray[np.float64] = tokens / max(self.prompt_tokens, 1)
        return ratios

    def pinned_hit_ratio(self, policy: str, blocks: int) -> float:
        """Return the hit ratio of an engine's pool with this policy, where running requests hold their blocks."""
        hits = [self.visits.pinned(policy, part.events, [blocks], part.warm_up)[0][0] for part in self.parts]
        return int(np.sum(hits)) / max(self.prompt_tokens, 1)

    def _hit_tokens(self, policy: str, part: Part, sizes: Int64Column) -> Int64Column:
        if policy == "insertion":
            return self.visits.fifo(part.rows, sizes, part.warm_up)
        if policy == "optimal":
            return self.visits.optimal(part.rows, sizes, part.warm_up)
        if policy not in (*POLICIES, PINNED):
            raise ConfigError(f"policies: {policy!r} is not known; choose from {', '.join(POLICIES)}")
        name = "optimal" if policy == PINNED else policy
        return self.visits.pinned(name, part.events, sizes, part.warm_up)[0]


def _serial_events(rows: Int64Column) -> Int64Column:
    return np.column_stack([rows, ~rows]).ravel()


def _order_events(run: Timeline, rows: Int64Column) -> Int64Column:
    """Return the begins and ends of `rows` in the order of time; an unfinished request ends last."""
    begins, ends = run.first_admit_ns[rows], run.finish_ns[rows]
    ends = np.where(ends < 0, np.iinfo(np.int64).max, ends)
    # At one time, requests that end free their blocks first, except for those that also begin then.
    kinds = np.concatenate([np.ones(len(rows)), 2 * (ends == begins)])
    order = np.lexsort((kinds, np.concatenate([begins, ends])))
    return np.concatenate([rows, ~rows])[order]


def _group(numbers: Int32Column) -> list[Int64Column]:
    """Return the places of each number, the least number first."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
