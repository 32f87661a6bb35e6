"""Columns of a run with prefill and decode pools, in addition to those of the timeline."""

# Annotations are evaluated when the class is created, because the schema reads them.
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray

from understudy._core import LinkUsage
from understudy.errors import InvalidArgument
from understudy.run.schema import About, check_columns, take_columns
from understudy.workload.columns import Int32Column, Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult
    from understudy.workload import Workload


_OUT, _IN = "hand-off out", "hand-off in"
"""Ends of the names that the core gives to links of hand-offs: `worker N hand-off out`."""


class Way(IntEnum):
    """How a request was served."""

    NONE = 0
    """Not at all."""
    LOCAL = 1
    """The decode worker computed the prompt, by the rule."""
    REMOTE = 2
    """A prefill worker computed the prompt."""
    FALLBACK = 3
    """A prefill worker computed the prompt, the read failed, and the decode worker computed the prompt again."""
    FAILED = 4
    """A prefill worker computed the prompt, the read failed, and the request ended."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class HandOffColumns:
    """Columns of a run with prefill and decode pools, one row per request in workload order."""

    way: Annotated[
        NDArray[np.uint8],
        About(
            "request",
            "index",
            "How the request was served: 0 not at all, 1 locally, 2 with a hand-off, 3 locally after a failed "
            "hand-off, 4 not, after a failed hand-off.",
        ),
    ]
    prefill_worker: Annotated[
        Int32Column, About("request", "index", "Worker that computed the prompt; −1 without a hand-off.")
    ]
    prefill_admit_ns: Annotated[
        Int64Column, About("request", "time ns", "Start of the prefill worker's first step with the prompt.")
    ]
    prefill_done_ns: Annotated[
        Int64Column, About("request", "time ns", "When the prefill worker had computed the prompt.")
    ]
    decode_arrival_ns: Annotated[
        Int64Column, About("request", "time ns", "When the request arrived at its decode worker.")
    ]
    offered_ns: Annotated[
        Int64Column,
        About(
            "request",
            "time ns",
            "When the decode worker had memory for KV that SGLang's prefill worker pushes; −1 with vLLM.",
            digested=False,
        ),
    ]
    posted_ns: Annotated[
        Int64Column,
        About(
            "request", "time ns", "When the decode worker began to read the blocks, or the first were sent."
        ),
    ]
    landed_ns: Annotated[Int64Column, About("request", "time ns", "When the last block had arrived.")]
    bytes: Annotated[Int64Column, About("request", "bytes", "Bytes of the blocks that were read.")]
    decode_admit_ns: Annotated[
        Int64Column, About("request", "time ns", "Start of the decode worker's first step with the request.")
    ]
    sample_kept_blocks: Annotated[
        Int64Column, About("sample", "blocks", "Blocks of finished prompts that the worker keeps for others.")
    ]
    links: tuple[LinkUsage, ...]
    """Usage of each prefill worker's way out and each decode worker's way in, until all transfers had ended."""
    pushed_busy_ns: int = -1
    """Time in which KV moved that SGLang's prefill workers push; −1 with vLLM."""

    @classmethod
    def from_result(
        cls, result: "FleetResult", workload: "Workload", order: Int64Column | None
    ) -> "HandOffColumns":
        """Convert a result of the core, as `Timeline.from_result` does."""
        links = tuple(link for link in result.links if link.name.endswith((_OUT, _IN)))
        columns = take_columns(cls, _Source(result), workload, order)
        return cls(**columns, links=links, pushed_busy_ns=result.handoff.pushed_busy_ns)

    def __post_init__(self) -> None:
        check_columns(self)

    @property
    def handed_off(self) -> NDArray[np.bool_]:
        """Mask of requests that were sent to a prefill worker, whatever came of their hand-off."""
        mask: NDArray[np.bool_] = self.way >= Way.REMOTE
        return mask

    @property
    def remote(self) -> NDArray[np.bool_]:
        """Mask of requests that were handed off and whose blocks have arrived."""
        mask: NDArray[np.bool_] = (self.way == Way.REMOTE) & (self.landed_ns >= 0)
        return mask

    @property
    def links_out(self) -> tuple[LinkUsage, ...]:
        """Links of prefill workers, in their order."""
        return tuple(link for link in self.links if link.name.endswith(_OUT))

    @property
    def links_in(self) -> tuple[LinkUsage, ...]:
        """Links of decode workers, in their order."""
        return tuple(link for link in self.links if link.name.endswith(_IN))

    @property
    def prefill_workers(self) -> list[int]:
        """Indices of the prefill workers."""
        return [int(link.name.split()[1]) for link in self.links_out]

    def check(self, requests: int) -> None:
        """Raise InvalidArgument unless they have a row for each request."""
        if len(self.way) != requests:
            raise InvalidArgument(f"way has {len(self.way)} rows for {requests} requests")

    def prompt_worker(self, worker: Int32Column) -> Int32Column:
        """Return the worker that computed the prompt of each request. `worker`: the one that decoded it."""
        return np.where(self.handed_off, self.prefill_worker, worker)

    def ttft_parts_ns(self, arrival_ns: Int64Column, first_token_ns: Int64Column) -> dict[str, Int64Column]:
        """Split the time to the first token of requests that were handed off; the parts add up to it exactly."""
        rows = self.remote & (first_token_ns >= 0)
        pushed_marks = {
            "decode queue": self.offered_ns,
            "prefill queue": self.prefill_admit_ns,
            "prefill": self.prefill_done_ns,
            "transfer": self.landed_ns,
            "polls": first_token_ns,
        }
        pulled_marks = {
            "prefill queue": self.prefill_admit_ns,
            "prefill": self.prefill_done_ns,
            "hop": self.decode_arrival_ns,
            "decode queue": self.posted_ns,
            "transfer": self.landed_ns,
            "polls": self.decode_admit_ns,
            "first step": first_token_ns,
        }
        marks = pushed_marks if (self.offered_ns >= 0).any() else pulled_marks
        parts, before = {}, arrival_ns[rows]
        for name, mark in marks.items():
            parts[name] = mark[rows] - before
            before = mark[rows]
        return parts


class _Source:
    """The core's result: hand-offs have a table of their own, samples are the run's."""

    def __init__(self, result: "FleetResult") -> None:
        self._result = result

    def __getattr__(self, name: str) -> object:
        return getattr(self._result if name.startswith("sample_") else self._result.handoff, name)
