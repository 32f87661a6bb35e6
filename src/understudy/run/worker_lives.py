"""Lives of the workers of a fleet that changes: when each was starting, ready, draining, and gone."""

# Annotations are evaluated when the class is created: the schema reads them.
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument
from understudy.run.scaler_driver import ScaleDecision
from understudy.run.schema import About, check_columns, refuse, take_columns
from understudy.workload.columns import Int32Column, Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult

UInt8Column = NDArray[np.uint8]


class Life(IntEnum):
    """State of a worker."""

    STARTING = 0
    """Ordered, and paid for; it serves no request yet."""
    READY = 1
    DRAINING = 2
    """Gets no new requests, and serves those that it has."""
    STOPPED = 3
    CRASHED = 4
    RESTARTING = 5


PAID = (Life.STARTING, Life.READY, Life.DRAINING, Life.RESTARTING)
"""States in which a worker has its GPUs."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WorkerLives:
    """States that workers entered, in order of time, and what the scaler decided."""

    life_ns: Annotated[Int64Column, About("life", "time ns", "When the worker entered the state.")]
    life_worker: Annotated[Int32Column, About("life", "index", "Index of the worker.")]
    life_state: Annotated[UInt8Column, About("life", "name", "State: a `Life`.")]
    worker_pool: Annotated[
        Int32Column,
        About("worker", "index", "Pool of each worker, those that joined during the run included."),
    ]
    decisions: Sequence[ScaleDecision] = ()
    """Numbers of workers that the scaler asked for, where it asked for a change."""

    @classmethod
    def from_result(cls, result: "FleetResult", decisions: Sequence[ScaleDecision] = ()) -> "WorkerLives":
        """Convert a result of the core."""
        return cls(**take_columns(cls, result, None, None), decisions=tuple(decisions))

    def __post_init__(self) -> None:
        check_columns(self)
        refuse("life_state", self.life_state > max(Life), f"must be 0 to {max(Life):d}")
        bad = (self.life_worker < 0) | (self.life_worker >= len(self.worker_pool))
        refuse("life_worker", bad, "is not a worker")
        refuse("life_ns", np.diff(self.life_ns, prepend=np.int64(0)) < 0, "must not descend")
        if len(set(self.life_worker.tolist())) != len(self.worker_pool):
            raise InvalidArgument("life_worker: every worker enters a state")

    def spans(self, end_ns: int) -> list[tuple[int, Life, int, int]]:
        """Return (worker, state, from, to) in ns for every state up to the end of the run, except empty ones."""
        found = []
        for worker in range(len(self.worker_pool)):
            rows = np.flatnonzero(self.life_worker == worker)
            times = [*self.life_ns[rows].tolist(), end_ns]
            for at, row in enumerate(rows.tolist()):
                since, until = min(times[at], end_ns), min(times[at + 1], end_ns)
                if since < until:
                    found.append((worker, Life(int(self.life_state[row])), since, until))
        return found

    def paid_ns(self, end_ns: int) -> int:
        """Return the time for which workers had their GPUs, summed over workers."""
        return sum(until - since for _, state, since, until in self.spans(end_ns) if state in PAID)

    def count_over_time(self, states: Sequence[Life], end_ns: int) -> tuple[Int64Column, Int64Column]:
        """Return the times (ns) at which the number of workers in these states changes, with the numbers since."""
        changes: dict[int, int] = {0: 0}
        for _, state, since, until in self.spans(end_ns):
            if state in states:
                changes[since] = changes.get(since, 0) + 1
                changes[until] = changes.get(until, 0) - 1
        times = np.array(sorted(changes), np.int64)
        return times, np.cumsum([changes[at] for at in times.tolist()]).astype(np.int64)
