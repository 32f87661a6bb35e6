"""Columns of a run's steps: the batch of each, and the decisions of its schedule."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy._core import StepTable


class Stop(IntEnum):
    """Why a schedule left requests in the queue."""

    NONE = 0
    SLOTS = 1
    BUDGET = 2
    BLOCKS = 3
    TRANSFERS = 4
    PREEMPTED = 5
    OTHER = 6


class EventKind(IntEnum):
    """Kinds of events in the life of a request."""

    PLACED = 0
    ADMITTED = 1
    RESUMED = 2
    PREEMPTED = 3


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepColumns:
    """Steps, batch entries, loads and events of a run; docs/explain.md describes every column.

    Steps are grouped by worker, in time order. Consecutive steps with equal decode batches share one batch. Times are
    ns on the engines' clock, and requests are rows of the workload.
    """

    step_worker: NDArray[np.int32]
    step_begin_ns: NDArray[np.int64]
    step_end_ns: NDArray[np.int64]
    step_compute_ns: NDArray[np.int64]
    step_decodes_ns: NDArray[np.int64]
    step_batch: NDArray[np.int64]
    step_running: NDArray[np.int32]
    step_waiting: NDArray[np.int32]
    step_active_blocks: NDArray[np.int64]
    step_stop: NDArray[np.uint8]
    step_head: NDArray[np.int64]
    entry_batch: NDArray[np.int64]
    entry_request: NDArray[np.int64]
    entry_tokens: NDArray[np.int32]
    entry_before: NDArray[np.int32]
    entry_decodes: NDArray[np.uint8]
    entry_own_ns: NDArray[np.int64]
    loading_step: NDArray[np.int64]
    loading_request: NDArray[np.int64]
    event_ns: NDArray[np.int64]
    event_worker: NDArray[np.int32]
    event_kind: NDArray[np.uint8]
    event_request: NDArray[np.int64]
    event_other: NDArray[np.int64]
    event_cached: NDArray[np.int64]

    @classmethod
    def take(cls, table: StepTable, order: NDArray[np.int64] | None = None) -> StepColumns:
        """Take the columns of a recorder, whose requests are rows of the workload in `order` (None: unchanged)."""
        columns: dict[str, Any] = table.take()
        if order is not None:
            rows = np.append(order, -1)  # -1 stays -1
            for name in ("step_head", "entry_request", "loading_request", "event_request", "event_other"):
                columns[name] = rows[columns[name]]
        return cls(**columns)

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> StepColumns:
        """Read the columns by name. InvalidArgument where one is missing or they contradict each other."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in arrays]:
            raise InvalidArgument(f"column {missing[0]} is missing; save the run again")
        columns = cls(**{name: arrays[name] for name in names})
        columns._check()
        return columns

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _check(self) -> None:
        for name, value in self.arrays().items():
            if value.ndim != 1 or value.dtype.kind not in "iu":
                raise InvalidArgument(f"column {name} must be a list of whole numbers; save the run again")
        for kind in ("step", "entry", "loading", "event"):
            lengths = {
                name: len(value) for name, value in self.arrays().items() if name.startswith(f"{kind}_")
            }
            if len(set(lengths.values())) > 1:
                raise InvalidArgument(f"columns {kind}_* have different lengths: {lengths}")
        for name in ("step_batch", "entry_batch", "step_worker"):
            if np.any(np.diff(getattr(self, name)) < 0):
                raise InvalidArgument(f"column {name} must ascend; save the run again")
        if np.any(self.step_end_ns < self.step_begin_ns):
            raise InvalidArgument("step_end_ns: a step ends before it begins; save the run again")
