"""Requests that lost their worker during a run, and what became of them."""

# Annotations are evaluated when the class is created: the schema reads them.
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from understudy.run.schema import NEVER, About, check_columns, refuse, take_columns
from understudy.workload.columns import Int32Column, Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult

UInt8Column = NDArray[np.uint8]

DRAINED = -1
"""In a column of faults: the worker had drained for too long."""


class Outcome(IntEnum):
    """What became of a request that lost its worker."""

    FAILED = 0
    RETRIED = 1
    """It started anew on another worker."""
    MIGRATED = 2
    """It went on on another worker, with the tokens so far."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RequestLosses:
    """Losses in order of time, one row each: a request may lose several workers. And when each fault took effect."""

    loss_ns: Annotated[Int64Column, About("loss", "time ns", "When the request lost its worker.")]
    loss_request: Annotated[Int64Column, About("loss", "index", "Row of the request.")]
    loss_worker: Annotated[Int32Column, About("loss", "index", "Worker that it lost.")]
    loss_outcome: Annotated[UInt8Column, About("loss", "name", "What became of it: an `Outcome`.")]
    loss_fault: Annotated[
        Int32Column,
        About("loss", "index", "Number of the fault in the plan; −1: a drain that took too long."),
    ]
    loss_tokens: Annotated[
        Int32Column, About("loss", "tokens", "Output tokens that this worker had made of it.")
    ]
    fault_began_ns: Annotated[
        Int64Column, About("fault", "time ns", "When the fault began; −1: it found nothing to fail.")
    ]
    fault_ended_ns: Annotated[
        Int64Column, About("fault", "time ns", "When it ended; −1: not before the run's end.")
    ]

    @classmethod
    def from_result(cls, result: "FleetResult", order: Int64Column | None) -> "RequestLosses":
        """Convert a result of the core, whose rows are those of the workload in `order` (None: unchanged)."""
        taken = take_columns(cls, result, None, None)
        if order is not None:
            taken["loss_request"] = order[taken["loss_request"]]
        return cls(**taken)

    def __post_init__(self) -> None:
        check_columns(self)
        refuse("loss_outcome", self.loss_outcome > max(Outcome), f"must be 0 to {max(Outcome):d}")
        refuse("loss_fault", self.loss_fault >= len(self.fault_began_ns), "is not a fault of the plan")
        refuse("loss_fault", self.loss_fault < DRAINED, "is not a fault of the plan")
        refuse("loss_ns", np.diff(self.loss_ns, prepend=np.int64(0)) < 0, "must not descend")
        refuse("loss_tokens", self.loss_tokens < 0, "must not be negative")
        never = self.fault_began_ns == NEVER
        refuse("fault_ended_ns", never & (self.fault_ended_ns != NEVER), "of a fault that never began")

    def of_fault(self, number: int) -> NDArray[np.bool_]:
        """Return which losses a fault caused."""
        return np.equal(self.loss_fault, number)
