"""The timeline of a run: columns of its requests and of samples of its workers."""

# Annotations are evaluated when the class is created: the schema reads them, and compiling their text takes ms.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument
from understudy.run.handoff_columns import HandOffColumns
from understudy.run.losses import RequestLosses
from understudy.run.scaler_driver import ScaleDecision
from understudy.run.schema import NEVER, About, check_columns, list_totals, refuse, take_columns
from understudy.run.tier_columns import TierColumns
from understudy.run.worker_lives import WorkerLives
from understudy.workload.columns import BoolColumn, Int32Column, Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult
    from understudy.workload import Workload

UInt8Column = NDArray[np.uint8]

_TIMES = (
    "arrival_ns",
    "queued_ns",
    "first_admit_ns",
    "first_token_ns",
    "second_token_ns",
    "last_token_ns",
    "finish_ns",
)
_COUNTS = ("prompt_tokens", "requested_output_tokens", "output_tokens", "cached_tokens_first", "preemptions")
_SIZES = ("num_workers", "blocks_per_worker", "block_size")


class Status(IntEnum):
    """Final status of a request."""

    COMPLETED = 0
    REJECTED = 1
    CANCELLED = 2
    UNFINISHED = 3
    FAILED = 4
    """The engine ended it with an error: its KV blocks did not arrive."""


class FinishReason(IntEnum):
    """Reason why a completed request ended."""

    NONE = 0
    """Not completed."""
    LENGTH = 1
    """Limit of output tokens, or the model's context."""
    STOP = 2
    """End-of-sequence token of the model."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """Columns of a run: row i of a request column describes request i of the given workload.

    Times are nanoseconds on the run's clock, −1 for never. Arrays are read-only, and not copied if they have the right
    dtype. The constructor raises InvalidArgument or RowError, naming column and row, for inconsistent columns.
    """

    arrival_ns: Annotated[
        Int64Column,
        About(
            "request",
            "time ns",
            "When the request became ready; −1 for a turn that its session did not reach.",
        ),
    ]
    queued_ns: Annotated[
        Int64Column,
        About(
            "request",
            "time ns",
            "When its engine read the request: on arrival if idle, else at the end of the step (vLLM's `queued_ts`).",
            digested=False,
        ),
    ]
    first_admit_ns: Annotated[
        Int64Column, About("request", "time ns", "Start of the step that first scheduled the request.")
    ]
    first_token_ns: Annotated[
        Int64Column, About("request", "time ns", "When the first output token was visible.")
    ]
    second_token_ns: Annotated[
        Int64Column, About("request", "time ns", "When the second output token was visible.")
    ]
    last_token_ns: Annotated[
        Int64Column,
        About("request", "time ns", "When the last output token was visible; −1 if there was none."),
    ]
    finish_ns: Annotated[
        Int64Column,
        About(
            "request",
            "time ns",
            "When the request completed, failed, was rejected or was cancelled; −1 only if unfinished.",
        ),
    ]
    prompt_tokens: Annotated[Int32Column, About("request", "tokens", "Prompt length.", "workload")]
    requested_output_tokens: Annotated[
        Int32Column,
        About(
            "request",
            "tokens",
            "Output length in the workload, after limits.",
            "workload",
            "cut_output_tokens",
        ),
    ]
    output_tokens: Annotated[Int32Column, About("request", "tokens", "Emitted tokens.")]
    cached_tokens_first: Annotated[
        Int32Column,
        About("request", "tokens", "Prompt tokens in the prefix cache at the first admission."),
    ]
    cached_tokens_total: Annotated[
        Int64Column,
        About(
            "request",
            "tokens",
            "Tokens in the prefix cache, summed over all admissions (one more after each preemption).",
        ),
    ]
    looked_up_tokens: Annotated[
        Int64Column,
        About(
            "request",
            "tokens",
            "Tokens of the request (prompt and output so far), summed over all admissions.",
        ),
    ]
    preemptions: Annotated[Int32Column, About("request", "times", "Number of preemptions of the request.")]
    worker: Annotated[Int32Column, About("request", "index", "Worker of the request; −1 for none.")]
    status: Annotated[UInt8Column, About("request", "name", "Final status: a `Status`.")]
    finish_reason: Annotated[
        UInt8Column,
        About(
            "request", "name", "Why a completed request ended: a `FinishReason`, `length` or `stop` (EOS)."
        ),
    ]
    session: Annotated[
        Int32Column, About("request", "index", "Session index, as in the workload.", "workload")
    ]
    turn: Annotated[Int32Column, About("request", "index", "Position within the session.", "workload")]
    itl_ns: Annotated[
        Int64Column,
        About("gap", "ns", "Distinct gaps between consecutive tokens of completed requests, ascending."),
    ]
    itl_count: Annotated[Int64Column, About("gap", "gaps", "Number of gaps of that length.")]
    sample_time_ns: Annotated[
        Int64Column,
        About(
            "sample",
            "time ns",
            "When a worker was sampled; a sample is valid until the worker's next one.",
        ),
    ]
    sample_worker: Annotated[Int32Column, About("sample", "index", "Index of the sampled worker.")]
    sample_running: Annotated[Int64Column, About("sample", "requests", "Running requests of the worker.")]
    sample_waiting: Annotated[Int64Column, About("sample", "requests", "Waiting requests of the worker.")]
    sample_used_blocks: Annotated[Int64Column, About("sample", "blocks", "Active blocks of the worker.")]
    sample_cached_blocks: Annotated[
        Int64Column, About("sample", "blocks", "Inactive blocks of the worker: cached, evictable.")
    ]

    num_workers: int
    """Workers in the run, ≥ 1."""
    blocks_per_worker: int
    """Usable KV blocks of each worker, ≥ 1; the maximum where pools differ."""
    block_size: int
    """Tokens in a block, ≥ 1."""
    steps: int
    """Engine steps over all workers."""
    evictions: int
    """Evicted cached blocks."""
    stored_blocks: int
    """Blocks stored in the prefix cache."""
    phantom_hit_blocks: int = 0
    """Blocks counted as hits without their tokens (a defect of some engine versions)."""
    expired_leases: int = 0
    """Leases of kept blocks that ended before a decode worker read them."""
    late_notifications: int = 0
    """Reads that ended after the lease of their blocks, so that the blocks may have been overwritten."""
    burst_steps: int = 0
    """Steps of requests that sampled with the mocker's speculation."""
    burst_tokens: int = 0
    """Tokens of these steps."""
    draft_rounds: int = 0
    """Steps of requests that verified drafts (vLLM's speculation)."""
    drafted_tokens: int = 0
    """Verified drafts."""
    accepted_tokens: int = 0
    """Accepted drafts."""
    request_ids: Sequence[str] | None = None
    """Request names of the workload, if it has them."""
    reject_reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons by row for rejected requests."""
    own_blocks: Sequence[int] = ()
    """KV blocks of each worker, where pools differ; empty where all have `blocks_per_worker`."""
    tiers: TierColumns | None = None
    """Columns of tiers; None without tiers."""
    handoff: HandOffColumns | None = None
    """Columns of prefill and decode pools; None without roles."""
    lives: WorkerLives | None = None
    """Lives of workers that joined and left; None where the workers stayed the same."""
    losses: RequestLosses | None = None
    """Requests that lost their worker, in a run with faults or with a limit on drains; else None."""

    @classmethod
    def from_result(
        cls,
        result: "FleetResult",
        workload: "Workload",
        order: Int64Column | None,
        *,
        worker_blocks: Sequence[int],
        block_size: int,
        decisions: Sequence[ScaleDecision] = (),
    ) -> "Timeline":
        """Convert a result of the core, whose rows are those of `workload` in `order` (None: unchanged)."""
        totals = {name: getattr(result, name) for name in list_totals(cls) if name not in _SIZES}
        rejections = {row if order is None else int(order[row]): why for row, why in result.rejections}
        return cls(
            **take_columns(cls, result, workload, order),
            **totals,
            num_workers=len(worker_blocks),
            blocks_per_worker=max(worker_blocks),
            own_blocks=() if len(set(worker_blocks)) == 1 else worker_blocks,
            block_size=block_size,
            request_ids=workload.request_ids,
            reject_reasons=rejections,
            tiers=TierColumns.from_result(result, workload, order) if result.tiers else None,
            handoff=HandOffColumns.from_result(result, workload, order) if len(result.handoff.way) else None,
            lives=WorkerLives.from_result(result, decisions) if len(result.life_ns) else None,
            losses=RequestLosses.from_result(result, order)
            if len(result.fault_began_ns) or len(result.loss_ns)
            else None,
        )

    def __post_init__(self) -> None:
        check_columns(self)
        self._check_scalars()
        self._check_requests()
        self._check_gaps()
        self._check_samples()
        if self.tiers is not None:
            self.tiers.check(self.cached_tokens_first, self.cached_tokens_total, self.sample_used_blocks)
        if self.handoff is not None:
            self.handoff.check(len(self))

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_ns)

    @property
    def worker_blocks(self) -> Int64Column:
        """Usable KV blocks of each worker."""
        blocks = self.own_blocks or [self.blocks_per_worker] * self.num_workers
        return np.asarray(blocks, dtype=np.int64)

    @property
    def completed(self) -> BoolColumn:
        """Mask of completed requests."""
        done: BoolColumn = self.status == Status.COMPLETED
        return done

    @property
    def served_ns(self) -> Int64Column:
        """Time of each request's last token or, without tokens, of its finish."""
        return np.where(self.output_tokens > 0, self.last_token_ns, self.finish_ns)

    @property
    def start_ns(self) -> int:
        """First arrival; 0 if no request arrived."""
        arrived = self.arrival_ns[self.arrival_ns >= 0]
        return int(arrived.min()) if len(arrived) else 0

    @property
    def end_ns(self) -> int:
        """Last token of any request; without tokens the last completion, else `start_ns`."""
        last = int(self.last_token_ns.max(initial=NEVER))
        if last == NEVER:
            last = int(self.finish_ns[self.completed].max(initial=NEVER))
        return max(last, self.start_ns)

    def _check_scalars(self) -> None:
        for name in list_totals(type(self)):
            value = getattr(self, name)
            least = 1 if name in _SIZES else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.request_ids is not None and len(self.request_ids) != len(self):
            raise InvalidArgument(f"request_ids has {len(self.request_ids)} entries for {len(self)} requests")
        for row in self.reject_reasons:
            if not 0 <= row < len(self) or self.status[row] != Status.REJECTED:
                raise InvalidArgument(f"reject_reasons names row {row}, which was not rejected")

    def _check_requests(self) -> None:
        for name in _COUNTS:
            refuse(name, getattr(self, name) < 0, "must not be negative")
        refuse("status", self.status > max(Status), f"must be one of 0 to {max(Status):d}")
        refuse("worker", (self.worker < -1) | (self.worker >= self.num_workers), "is not a worker")
        latest = np.full(len(self), NEVER, np.int64)
        for name in _TIMES:
            time = getattr(self, name)
            refuse(name, time < NEVER, "must be −1 (never) or a time")
            refuse(name, (time != NEVER) & (time < latest), "comes before the event that it follows")
            latest = np.maximum(latest, time)
        refuse("arrival_ns", self.completed & (self.arrival_ns == NEVER), "of a completed request is missing")
        unfinished = self.status == Status.UNFINISHED
        refuse("finish_ns", unfinished & (self.finish_ns != NEVER), "of an unfinished request must be −1")
        refuse("finish_ns", ~unfinished & (self.finish_ns == NEVER), "of a terminal request is missing")
        refuse("finish_reason", self.finish_reason > max(FinishReason), f"must be 0 to {max(FinishReason):d}")
        unended = self.finish_reason == FinishReason.NONE
        refuse("finish_reason", self.completed == unended, "does not agree with status")
        for name, tokens in (("first_token_ns", 1), ("second_token_ns", 2), ("last_token_ns", 1)):
            has_time = getattr(self, name) != NEVER
            refuse(name, has_time != (self.output_tokens >= tokens), "does not agree with output_tokens")
        admitted = self.first_admit_ns != NEVER
        refuse("first_admit_ns", (self.output_tokens > 0) & ~admitted, "of a request with tokens is missing")
        refuse("queued_ns", admitted & (self.queued_ns == NEVER), "of a request that was admitted is missing")
        too_much = self.cached_tokens_first > self.prompt_tokens
        refuse("cached_tokens_first", too_much, "is above prompt_tokens")
        too_little = self.cached_tokens_total < self.cached_tokens_first
        refuse("cached_tokens_total", too_little, "is below cached_tokens_first")
        too_much = self.cached_tokens_total > self.looked_up_tokens
        refuse("cached_tokens_total", too_much, "is above looked_up_tokens")

    def _check_gaps(self) -> None:
        refuse("itl_ns", self.itl_ns < 0, "must not be negative")
        refuse("itl_ns", np.diff(self.itl_ns, prepend=np.int64(NEVER)) <= 0, "must ascend")
        refuse("itl_count", self.itl_count < 1, "must be at least 1")
        rows = self.completed & (self.output_tokens > 1)
        gaps = int(self.output_tokens[rows].sum(dtype=np.int64)) - int(rows.sum())
        if int(self.itl_count.sum()) != gaps:
            raise InvalidArgument(
                f"itl_count adds up to {self.itl_count.sum()}, but completed requests have {gaps} gaps"
            )
        # Both sums may wrap around, with equal results.
        if (self.itl_ns * self.itl_count).sum() != (self.last_token_ns - self.first_token_ns)[rows].sum():
            raise InvalidArgument("itl_ns times itl_count is not the time from first to last tokens")

    def _check_samples(self) -> None:
        refuse("sample_time_ns", self.sample_time_ns < 0, "must not be negative")
        bad = (self.sample_worker < 0) | (self.sample_worker >= self.num_workers)
        refuse("sample_worker", bad, "is not a worker")
        for name in ("sample_running", "sample_waiting", "sample_used_blocks", "sample_cached_blocks"):
            refuse(name, getattr(self, name) < 0, "must not be negative")
        bad = self.sample_used_blocks + self.sample_cached_blocks > self.worker_blocks[self.sample_worker]
        refuse("sample_used_blocks", bad, "and sample_cached_blocks are more than blocks_per_worker")
