"""Hit ratios of a workload by cache size, for the policies of the engines' pools and for bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import BlockVisits
from understudy.errors import ConfigError
from understudy.kv.policy import BUILT_IN_POLICIES
from understudy.workload.reuse import serving_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload
    from understudy.workload.columns import BoolColumn, Int64Column

POLICIES = (*BUILT_IN_POLICIES, "insertion", "optimal")
"""Names of a replay's `eviction_policy`, and two that no engine has."""
DEFAULT_POLICIES = ("lru", "insertion", "lineage", "multi_lru", "optimal")
PINNED = "optimal_pinned"
"""Optimal eviction where running requests hold their blocks."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Requests that share one cache."""

    rows: Int64Column
    """In the order in which they begin."""
    events: Int64Column
    """Begins (row) and ends (−1 − row) in the order of time."""
    warm_up: int
    """Number of first rows whose hits are not counted."""


class CacheCurves:
    """Hit ratios of caches of every size that serve a workload.

    Without `run`, one cache serves the requests one at a time in arrival order. With the timeline of a `run`, each
    worker has a cache and serves its requests in the order and with the overlap of that run.
    """

    def __init__(
        self,
        workload: Workload,
        block_size: int,
        *,
        prompts_only: bool = False,
        warm_up: float = 0.0,
        run: Timeline | None = None,
    ) -> None:
        """Number the workload's blocks.

        `prompts_only` counts prompts with their partly filled last block, not outputs, and lets a request read all of
        its blocks. `warm_up` is the share of requests, from the first, that fill the caches without being counted.
        Errors: ConfigError unless 0 ≤ `warm_up` < 1; InvalidArgument for 2^32 block visits or more.
        """
        if not 0 <= warm_up < 1:
            raise ConfigError(
                f"warm_up must be at least 0 and below 1, got {warm_up}; 0.5 skips the first half"
            )
        self.block_size = block_size
        self.visits = BlockVisits(workload, block_size, prompts_only)
        self.is_serial = run is None
        self.rows = serving_order(workload).astype(np.int64) if run is None else _admission_order(run)
        """Rows of all parts in the order in which they begin."""
        skipped = np.zeros(len(workload), np.bool_)
        skipped[self.rows[: int(warm_up * len(self.rows))]] = True
        self.parts = [_serial(self.rows, skipped)] if run is None else _split(run, self.rows, skipped)
        counted = np.concatenate([part.rows[part.warm_up :] for part in self.parts])
        self.prompt_tokens = int(workload.prompt_tokens[counted].sum(dtype=np.int64))

    @cached_property
    def lru_hit_tokens(self) -> Int64Column:
        """Prompt tokens that hit in LRU caches, by blocks of each cache from 0, summed over the caches."""
        curves = [self.visits.lru(part.rows, part.warm_up)[0] for part in self.parts]
        longest = max(map(len, curves))
        total = np.zeros(longest, np.int64)
        for curve in curves:
            total += np.pad(curve, (0, longest - len(curve)), mode="edge")
        return total

    @property
    def unlimited_hit_ratio(self) -> float:
        """Share of prompt tokens that hit in unlimited caches."""
        return int(self.lru_hit_tokens[-1]) / max(self.prompt_tokens, 1)

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

    def _hit_tokens(self, policy: str, part: Part, sizes: Int64Column) -> Int64Column:
        if policy == "insertion":
            return self.visits.fifo(part.rows, sizes, part.warm_up)
        if policy == "optimal":
            return self.visits.optimal(part.rows, sizes, part.warm_up)
        if policy not in (*POLICIES, PINNED):
            raise ConfigError(f"policies: {policy!r} is not known; choose from {', '.join(POLICIES)}")
        name = "optimal" if policy == PINNED else policy
        return self.visits.pinned(name, part.events, sizes, part.warm_up)[0]


def _serial(rows: Int64Column, skipped: BoolColumn) -> Part:
    return Part(rows, np.column_stack([rows, ~rows]).ravel(), int(skipped[rows].sum()))


def _admission_order(run: Timeline) -> Int64Column:
    """Return the rows that were served, in the order in which they were admitted."""
    rows = np.flatnonzero((run.first_admit_ns >= 0) & (run.finish_ns >= 0))
    return rows[np.argsort(run.first_admit_ns[rows], kind="stable")].astype(np.int64)


def _split(run: Timeline, rows: Int64Column, skipped: BoolColumn) -> list[Part]:
    """Return the rows of each worker, as they were admitted and as they ended."""
    parts = []
    for worker in range(run.num_workers):
        own = rows[run.worker[rows] == worker]
        times = np.concatenate([run.first_admit_ns[own], run.finish_ns[own]])
        # At one time, requests that end free their blocks first, except for those that also begin then.
        is_instant = run.finish_ns[own] == run.first_admit_ns[own]
        order = np.lexsort((np.concatenate([np.ones(len(own)), 2 * is_instant]), times))
        parts.append(Part(own, np.concatenate([own, ~own])[order], int(skipped[own].sum())))
    return parts
