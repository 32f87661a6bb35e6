"""Candidates of a KV-aware router's decisions, with the terms of their costs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy import _core

TERMS = ("prefill", "active", "added", "requests")
"""Terms of a cost, in the order in which they are added."""
_OVERLAPS = ("overlap_blocks", "lower_overlap_blocks")


class KvCandidates(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Workers that could have been chosen, one row each, in the order of the decisions. Costs are in blocks."""

    ends: npt.NDArray[np.int64]
    """By decision: end of its rows; they begin where those of the decision before end."""
    worker: npt.NDArray[np.int64]
    prefill: npt.NDArray[np.float64]
    """Queued prompt tokens and the request's own, less the credit for cached blocks."""
    active: npt.NDArray[np.float64]
    """Distinct prompt blocks of the worker's live requests."""
    added: npt.NDArray[np.float64]
    """Prompt blocks of the request that these do not have."""
    requests: npt.NDArray[np.float64]
    """Live requests, weighted."""
    credit: npt.NDArray[np.float64]
    """Reduction of `prefill` by cached blocks, where that stayed above 0."""
    overlap_blocks: npt.NDArray[np.int64]
    lower_overlap_blocks: npt.NDArray[np.int64]

    @classmethod
    def take(cls, router: _core.KvRouter) -> KvCandidates | None:
        """Read the candidates of the last run; None if they were not kept."""
        if not len(router.candidate_workers):
            return None
        return cls(
            ends=router.candidate_ends,
            worker=router.candidate_workers,
            prefill=router.candidate_prefill,
            active=router.candidate_active,
            added=router.candidate_added,
            requests=router.candidate_requests,
            credit=router.candidate_credit,
            overlap_blocks=router.candidate_overlap_blocks,
            lower_overlap_blocks=router.candidate_lower_overlap_blocks,
        )

    @property
    def cost(self) -> npt.NDArray[np.float64]:
        """Cost of each: the sum of its four terms."""
        return self.prefill + self.active + self.added + self.requests

    def describe(self, first: int = 0, last: int | None = None) -> list[list[dict[str, Any]]]:
        """Return the candidates of decisions `first` to before `last` as JSON values, the cheapest first."""
        bounds = [0 if first == 0 else int(self.ends[first - 1]), *self.ends[first:last].tolist()]
        part = slice(bounds[0], bounds[-1])
        names = ("worker", "cost", *TERMS, "credit", *_OVERLAPS)
        columns = [self.cost if name == "cost" else getattr(self, name) for name in names]
        values = zip(*(column[part].tolist() for column in columns), strict=True)
        rows = [dict(zip(names, row, strict=True)) for row in values]
        starts = [bound - bounds[0] for bound in bounds]
        each = [rows[begin:end] for begin, end in pairwise(starts)]
        return [sorted(some, key=lambda row: row["cost"]) for some in each]
