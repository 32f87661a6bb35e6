"""Choices of a router that records no costs: the worker, and the blocks that each candidate had cached."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import RecordedRouter
    from understudy.router.choice import NotedRouter


class Candidates(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Workers that could have been chosen, one row each, in the order of the choices."""

    ends: npt.NDArray[np.int64]
    """By choice: end of its rows; they begin where those of the choice before end."""
    worker: npt.NDArray[np.int64]
    outstanding_requests: npt.NDArray[np.int64]
    """Requests sent to the worker that had not ended."""
    outstanding_tokens: npt.NDArray[np.int64]
    """Prompt and requested output tokens of those."""
    true_overlap_blocks: npt.NDArray[np.int64]
    """Leading prompt blocks that the worker had on its device."""

    def describe(
        self, block_size: int, first: int = 0, last: int | None = None
    ) -> list[list[dict[str, int]]]:
        """Return the candidates of choices `first` to before `last` as JSON values, with cached tokens."""
        bounds = [0 if first == 0 else int(self.ends[first - 1]), *self.ends[first:last].tolist()]
        part = slice(bounds[0], bounds[-1])
        names = ("worker", "outstanding_requests", "outstanding_tokens", "cached_tokens")
        cached = self.true_overlap_blocks * block_size
        columns = (self.worker, self.outstanding_requests, self.outstanding_tokens, cached)
        values = zip(*(column[part].tolist() for column in columns), strict=True)
        rows = [dict(zip(names, row, strict=True)) for row in values]
        starts = [bound - bounds[0] for bound in bounds]
        return [rows[begin:end] for begin, end in pairwise(starts)]


class Choices(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Choices of a run, one row each, with the blocks that workers had cached at that time."""

    rows: npt.NDArray[np.int64]
    """Rows of the workload."""
    time_ns: npt.NDArray[np.int64]
    worker: npt.NDArray[np.int32]
    true_overlap_blocks: npt.NDArray[np.int32]
    """Leading prompt blocks that the chosen worker had on its device."""
    best_true_overlap_blocks: npt.NDArray[np.int32]
    """Highest `true_overlap_blocks` of any candidate."""
    candidates: Candidates | None = None
    """Workers that could have been chosen, if they were kept."""
    scores: tuple[float | None, ...] = ()
    """Score of each choice, as a user-defined router gave it (`Choice`); empty for other routers."""
    reasons: tuple[str | None, ...] = ()
    """Reason of each choice, in the same way."""

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def take(
        cls,
        router: RecordedRouter,
        order: npt.NDArray[np.int64] | None,
        *,
        with_candidates: bool,
        noted: NotedRouter | None = None,
    ) -> Choices:
        """Read the choices of the last run; `order` maps the run's rows to those of the given workload."""
        names = ("time_ns", "worker", "true_overlap_blocks", "best_true_overlap_blocks")
        columns: dict[str, Any] = {name: getattr(router, name) for name in names}
        candidates = None
        if with_candidates:
            candidates = Candidates(
                ends=router.candidate_ends,
                worker=router.candidate_workers,
                outstanding_requests=router.candidate_requests,
                outstanding_tokens=router.candidate_tokens,
                true_overlap_blocks=router.candidate_overlap_blocks,
            )
        rows = router.rows
        if noted is not None:
            columns |= {"scores": tuple(noted.scores), "reasons": tuple(noted.reasons)}
        return cls(rows=rows if order is None else order[rows], candidates=candidates, **columns)
