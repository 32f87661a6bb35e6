"""The timeline: what happened to every request of a run, and how the workers fared, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument
from understudy.workload.columns import BoolColumn, Int32Column, Int64Column, RowError, column, first_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.replay.tier_columns import TierColumns

UInt8Column = NDArray[np.uint8]

NEVER = -1
"""Stands in a time column for what did not happen."""

_REQUEST_COLUMNS: dict[str, type[np.generic]] = {
    "first_admit_ns": np.int64,
    "first_token_ns": np.int64,
    "second_token_ns": np.int64,
    "last_token_ns": np.int64,
    "finish_ns": np.int64,
    "prompt_tokens": np.int32,
    "requested_output_tokens": np.int32,
    "output_tokens": np.int32,
    "cached_tokens_first": np.int32,
    "cached_tokens_total": np.int64,
    "looked_up_tokens": np.int64,
    "preemptions": np.int32,
    "worker": np.int32,
    "status": np.uint8,
    "session": np.int32,
    "turn": np.int32,
}
_SAMPLE_COLUMNS: dict[str, type[np.generic]] = {
    "sample_worker": np.int32,
    "sample_running": np.int64,
    "sample_waiting": np.int64,
    "sample_used_blocks": np.int64,
    "sample_cached_blocks": np.int64,
}
_TIMES = ("arrival_ns", "first_admit_ns", "first_token_ns", "second_token_ns", "last_token_ns", "finish_ns")
_COUNTS = ("prompt_tokens", "requested_output_tokens", "output_tokens", "cached_tokens_first", "preemptions")
_SIZES = ("num_workers", "blocks_per_worker", "block_size")
_TOTALS = ("steps", "evictions", "stored_blocks", "phantom_hit_blocks", "burst_steps", "burst_tokens")


class Status(IntEnum):
    """How a request ended."""

    COMPLETED = 0
    REJECTED = 1
    CANCELLED = 2
    UNFINISHED = 3


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Timeline:
    """Columns that a replay fills: row i of a request column describes request i of the workload as it was given.

    Times are nanoseconds on the run's clock, −1 for never. Arrays are read-only and not copied when they come
    with the right dtype. The constructor raises InvalidArgument or RowError, naming column and row, before an
    inconsistent timeline exists.
    """

    arrival_ns: Int64Column
    """When the request became ready; −1 for a turn whose session never got so far."""
    first_admit_ns: Int64Column
    """Start of the step that first scheduled it."""
    first_token_ns: Int64Column
    """When the first output token was visible."""
    second_token_ns: Int64Column
    """When the second output token was visible."""
    last_token_ns: Int64Column
    """When the last output token was visible; −1 when there was none."""
    finish_ns: Int64Column
    """When it completed, was rejected or was cancelled; −1 exactly when it is unfinished."""
    prompt_tokens: Int32Column
    """Prompt length."""
    requested_output_tokens: Int32Column
    """Output length that the workload asked for."""
    output_tokens: Int32Column
    """Tokens that were emitted."""
    cached_tokens_first: Int32Column
    """Prompt tokens found in the prefix cache at the first admission."""
    cached_tokens_total: Int64Column
    """Tokens found in the prefix cache, summed over all admissions (one more after each preemption)."""
    looked_up_tokens: Int64Column
    """Tokens that the request had (prompt, and output so far), summed over all admissions."""
    preemptions: Int32Column
    """How often the request was preempted."""
    worker: Int32Column
    """Worker that it was sent to; −1 for none."""
    status: UInt8Column
    """A `Status`."""
    session: Int32Column
    """Session index, as in the workload."""
    turn: Int32Column
    """Position within the session."""

    itl_ns: Int64Column
    """Distinct gaps between neighbouring tokens of completed requests, ascending."""
    itl_count: Int64Column
    """How many gaps have that length."""

    sample_time_ns: Int64Column
    """When a worker was sampled; what a sample says holds until the worker's next one."""
    sample_worker: Int32Column
    """Which worker."""
    sample_running: Int64Column
    """Its running requests."""
    sample_waiting: Int64Column
    """Its waiting requests."""
    sample_used_blocks: Int64Column
    """Its active blocks."""
    sample_cached_blocks: Int64Column
    """Its inactive blocks: cached, evictable."""

    num_workers: int
    """Workers in the run, ≥ 1."""
    blocks_per_worker: int
    """Usable KV blocks of each, ≥ 1."""
    block_size: int
    """Tokens in a block, ≥ 1."""
    steps: int
    """Engine steps over all workers."""
    evictions: int
    """Cached blocks that were evicted."""
    stored_blocks: int
    """Blocks that were stored in the prefix cache."""
    phantom_hit_blocks: int = 0
    """Blocks counted as hits that did not hold the tokens (a defect of some engine versions)."""
    burst_steps: int = 0
    """Turns that sampled with speculation."""
    burst_tokens: int = 0
    """Tokens that came of them."""
    request_ids: Sequence[str] | None = None
    """The workload's own names of its requests, where it has them."""
    reject_reasons: Mapping[int, str] = field(default_factory=dict)
    """Why, for rows that were rejected."""
    tiers: TierColumns | None = None
    """What lay below the device; None where nothing did."""

    def __post_init__(self) -> None:
        arrival_ns = column("arrival_ns", self.arrival_ns, np.int64)
        object.__setattr__(self, "arrival_ns", arrival_ns)
        self._set_columns(_REQUEST_COLUMNS, len(arrival_ns))
        self._set_columns({"itl_ns": np.int64}, None)
        self._set_columns({"itl_count": np.int64}, len(self.itl_ns))
        self._set_columns({"sample_time_ns": np.int64}, None)
        self._set_columns(_SAMPLE_COLUMNS, len(self.sample_time_ns))
        self._check_scalars()
        self._check_requests()
        self._check_gaps()
        self._check_samples()
        if self.tiers is not None:
            self.tiers.check(self)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_ns)

    @property
    def completed(self) -> BoolColumn:
        """Which requests completed."""
        done: BoolColumn = self.status == Status.COMPLETED
        return done

    @property
    def served_ns(self) -> Int64Column:
        """When a request had all it got: its last token or, without any, its finish."""
        return np.where(self.output_tokens > 0, self.last_token_ns, self.finish_ns)

    @property
    def start_ns(self) -> int:
        """First arrival; 0 when nobody arrived."""
        arrived = self.arrival_ns[self.arrival_ns >= 0]
        return int(arrived.min()) if len(arrived) else 0

    @property
    def end_ns(self) -> int:
        """Last token of anybody; when nobody emitted one the last completion, else `start_ns`."""
        last = int(self.last_token_ns.max(initial=NEVER))
        if last == NEVER:
            last = int(self.finish_ns[self.completed].max(initial=NEVER))
        return max(last, self.start_ns)

    def _set_columns(self, dtypes: dict[str, type[np.generic]], rows: int | None) -> None:
        for name, dtype in dtypes.items():
            object.__setattr__(self, name, column(name, getattr(self, name), dtype, rows))

    def _check_scalars(self) -> None:
        for name in _SIZES + _TOTALS:
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
            _refuse(name, getattr(self, name) < 0, "must not be negative")
        _refuse("status", self.status > max(Status), f"must be one of 0 to {max(Status):d}")
        _refuse("worker", (self.worker < -1) | (self.worker >= self.num_workers), "is not a worker")
        latest = np.full(len(self), NEVER, np.int64)
        for name in _TIMES:
            time = getattr(self, name)
            _refuse(name, time < NEVER, "must be −1 (never) or a time")
            _refuse(name, (time != NEVER) & (time < latest), "comes before the event that it follows")
            latest = np.maximum(latest, time)
        _refuse(
            "arrival_ns", self.completed & (self.arrival_ns == NEVER), "of a completed request is missing"
        )
        unfinished = self.status == Status.UNFINISHED
        _refuse("finish_ns", unfinished & (self.finish_ns != NEVER), "of an unfinished request must be −1")
        _refuse("finish_ns", ~unfinished & (self.finish_ns == NEVER), "of a terminal request is missing")
        for name, tokens in (("first_token_ns", 1), ("second_token_ns", 2), ("last_token_ns", 1)):
            has_time = getattr(self, name) != NEVER
            _refuse(name, has_time != (self.output_tokens >= tokens), "does not agree with output_tokens")
        admitted = self.first_admit_ns != NEVER
        _refuse("first_admit_ns", (self.output_tokens > 0) & ~admitted, "of a request with tokens is missing")
        too_much = self.cached_tokens_first > self.prompt_tokens
        _refuse("cached_tokens_first", too_much, "is above prompt_tokens")
        too_little = self.cached_tokens_total < self.cached_tokens_first
        _refuse("cached_tokens_total", too_little, "is below cached_tokens_first")
        too_much = self.cached_tokens_total > self.looked_up_tokens
        _refuse("cached_tokens_total", too_much, "is above looked_up_tokens")

    def _check_gaps(self) -> None:
        _refuse("itl_ns", self.itl_ns < 0, "must not be negative")
        _refuse("itl_ns", np.diff(self.itl_ns, prepend=np.int64(NEVER)) <= 0, "must ascend")
        _refuse("itl_count", self.itl_count < 1, "must be at least 1")
        rows = self.completed & (self.output_tokens > 1)
        gaps = int(self.output_tokens[rows].sum(dtype=np.int64)) - int(rows.sum())
        if int(self.itl_count.sum()) != gaps:
            raise InvalidArgument(
                f"itl_count adds up to {self.itl_count.sum()}, but completed requests have {gaps} gaps"
            )
        # Both sums may wrap; they wrap alike.
        if (self.itl_ns * self.itl_count).sum() != (self.last_token_ns - self.first_token_ns)[rows].sum():
            raise InvalidArgument("itl_ns times itl_count is not the time from first to last tokens")

    def _check_samples(self) -> None:
        _refuse("sample_time_ns", self.sample_time_ns < 0, "must not be negative")
        bad = (self.sample_worker < 0) | (self.sample_worker >= self.num_workers)
        _refuse("sample_worker", bad, "is not a worker")
        for name in ("sample_running", "sample_waiting", "sample_used_blocks", "sample_cached_blocks"):
            _refuse(name, getattr(self, name) < 0, "must not be negative")
        bad = self.sample_used_blocks + self.sample_cached_blocks > self.blocks_per_worker
        _refuse("sample_used_blocks", bad, "and sample_cached_blocks are more than blocks_per_worker")


def _refuse(name: str, bad: BoolColumn, reason: str) -> None:
    row = first_row(bad)
    if row is not None:
        raise RowError(name, row, reason)
