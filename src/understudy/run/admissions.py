"""The order in which a run admitted its requests, and the most that caches could hit in that order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy._core import BlockVisits
from understudy.engines.kinds.registry import kind_of_saved
from understudy.errors import InvariantViolated
from understudy.workload.reuse import HitCurve, largest_request_blocks, sum_curves

if TYPE_CHECKING:
    from understudy.run.facts import RunFacts
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import Int32Column, Int64Column
    from understudy.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class LastTokens:
    """How engines treat the ends of prompts and outputs, which decides whether caches can hit a last block."""

    loads_last: bool = False
    """A last block that a prompt fills may be loaded, and one token of it is computed: vLLM's own offload."""
    computes_last: bool = False
    """A request that ends by itself has begun one more step, which computes its last token: SGLang's overlap."""

    @classmethod
    def of(cls, run: RunFacts) -> LastTokens:
        """Read the settings of a run; what one pool does counts for all."""
        tiers = (run.tiers, *(pool.tiers for pool in run.pools))
        engines = (run.engine, *(pool.engine for pool in run.pools))
        return cls(
            loads_last=any(one.get("offload", {}).get("mode") == "vllm" for one in tiers),
            computes_last=any(map(_computes_last, engines)),
        )

    def number_blocks(self, workload: Workload, block_size: int) -> BlockVisits:
        """Number the blocks that the requests of a workload read and store."""
        return BlockVisits(workload, block_size, computes_last=self.computes_last)

    def unlimited_hits(
        self, visits: BlockVisits, rows: Int64Column, caches: Int32Column | None = None
    ) -> Int64Column:
        """Return the prompt tokens of each of `rows`, in this order, that unlimited caches hit.

        `caches` are the numbers of the caches, of each of `rows`; None: one cache for all.
        """
        return visits.unlimited(rows, caches, self.loads_last)


def _computes_last(engine: dict[str, Any]) -> bool:
    switch = kind_of_saved(engine).last_token_switch
    return switch is not None and not engine.get(switch)


def admission_order(timeline: Timeline) -> Int64Column:
    """Return the admitted rows in order of their first admission.

    Requests that one step admits are taken the shorter prompt first, so that an unlimited cache hits the most that any
    order within the step allows: a request computes at least one token of its prompt, which a longer one can hit.
    """
    rows = np.flatnonzero(timeline.first_admit_ns >= 0)
    order = np.lexsort((timeline.prompt_tokens[rows], timeline.first_admit_ns[rows]))
    return rows[order].astype(np.int64)


class HitBounds:
    """The most prompt tokens that unlimited caches hit with the requests of a run, in its order of admission.

    A request hits the blocks of prompts and of known outputs of all requests that were admitted before, with the same
    adapter; at least one token of its prompt is computed (`LastTokens` has the rules of last blocks). No run hits more
    at first admissions. A preempted request hits its own blocks again; neither this bound nor the hits at first
    admissions count that.
    """

    def __init__(self, workload: Workload, timeline: Timeline, last: LastTokens) -> None:
        """Number the blocks of `workload`."""
        self._last = last
        self.rows = admission_order(timeline)
        """Admitted requests in their order."""
        self.prompt_tokens = int(timeline.prompt_tokens[self.rows].sum(dtype=np.int64))
        self._workload = workload
        self._block_size = timeline.block_size
        # A hand-off leaves the blocks of a request on two workers.
        self._worker = (
            timeline.worker[self.rows] if timeline.handoff is None else np.zeros_like(self.rows, np.int32)
        )
        self._visits = last.number_blocks(workload, timeline.block_size)

    def hit_tokens(self, *, per_worker: bool = False) -> Int64Column:
        """Return the tokens of each of `rows` that one cache of all workers hits, or one of each worker."""
        return self._last.unlimited_hits(self._visits, self.rows, self._worker if per_worker else None)

    def hit_ratio(self, *, per_worker: bool = False) -> float:
        """Return `hit_tokens` as a share of the prompt tokens of all admitted requests; 0 without any."""
        return int(self.hit_tokens(per_worker=per_worker).sum()) / max(self.prompt_tokens, 1)

    def curve(self) -> HitCurve:
        """Compute the hit ratio by size of a worker's LRU cache."""
        by_worker = np.argsort(self._worker, kind="stable")
        rows = np.split(self.rows[by_worker], np.flatnonzero(np.diff(self._worker[by_worker])) + 1)
        curves = [self._visits.lru(own) for own in rows]
        return HitCurve(
            hit_tokens=sum_curves([curve for curve, _ in curves]),
            block_size=self._block_size,
            prompt_tokens=self.prompt_tokens,
            smallest_blocks=largest_request_blocks(self._workload, self._block_size),
            distinct_blocks=max(distinct for _, distinct in curves),
        )


def require_possible_hits(
    workload: Workload, timeline: Timeline, *, shares_tiers: bool, last: LastTokens
) -> None:
    """Raise InvariantViolated if first admissions hit more tokens than unlimited caches could.

    `shares_tiers`: workers may hit what others computed.
    """
    bounds = HitBounds(workload, timeline, last)
    for per_worker in (False,) if shares_tiers or timeline.handoff is not None else (False, True):
        worker = timeline.worker[bounds.rows] if per_worker else np.zeros(len(bounds.rows), np.int32)
        found = np.bincount(worker, timeline.cached_tokens_first[bounds.rows], timeline.num_workers)
        # Phantom hits are hits on blocks that were never computed.
        phantoms = timeline.phantom_hit_blocks * timeline.block_size
        most = np.bincount(worker, bounds.hit_tokens(per_worker=per_worker), timeline.num_workers) + phantoms
        if len(over := np.flatnonzero(found > most)):
            where = f"worker {over[0]}" if per_worker else "the run"
            raise InvariantViolated(
                f"cached_tokens_first: {where} hit {found[over[0]]:,.0f} prompt tokens, but unlimited caches could hit "
                f"{most[over[0]]:,.0f}"
            )
