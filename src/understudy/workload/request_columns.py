"""The columns of a workload, converted to arrays; `Workload` checks them and adds what can be done with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.columns import (
    BoolColumn,
    Int32Column,
    Int64Column,
    UInt32Column,
    column,
    next_turn_rows,
)
from understudy.workload.graph import RequestGraph  # noqa: TC001  (part of the public annotations)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Sentinels for "not given", compared by identity.
_ABSENT_INT32: Int32Column = np.empty(0, np.int32)
_ABSENT_INT64: Int64Column = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestColumns:
    """One row per request. The rules that the columns keep are those of `Workload`."""

    arrival_ns: Int64Column
    """Arrival of the session's first turn, ≥ 0; all 0 when `has_arrivals` is false."""
    prompt_tokens: Int32Column
    """Prompt length in tokens, ≥ 1."""
    output_tokens: Int32Column
    """Tokens that the model generates, ≥ 0; `max_tokens` may cut them."""
    hash_offsets: Int64Column
    """CSR offsets into `hash_ids`, one more than there are requests."""
    hash_ids: UInt32Column
    """Content of the prompts, one id per `trace_block_size` tokens."""
    trace_block_size: int
    """Tokens per hash id, ≥ 1; independent of an engine's block size."""

    has_arrivals: bool = True
    """False if the source had no timestamps; such a workload can only run closed loop."""
    session: Int32Column = field(default_factory=lambda: _ABSENT_INT32)
    """Session index; default: each request its own."""
    turn: Int32Column = field(default_factory=lambda: _ABSENT_INT32)
    """Position within the session; default 0."""
    delay_ns: Int64Column = field(default_factory=lambda: _ABSENT_INT64)
    """Think time after the previous turn completed; 0 for a first turn and by default."""
    elapsed_ns: Int64Column | None = None
    """Time from the session's first turn to this one, as the source recorded it; −1 where unknown. Not replayed: it
    orders the requests of cache curves."""
    priority: Int32Column = field(default_factory=lambda: _ABSENT_INT32)
    """Scheduling priority, passed to the engine; default 0."""
    max_tokens: Int32Column | None = None
    """Limit of the output length: ≥ 1, or −1 for none."""
    output_token_offsets: Int64Column | None = None
    """CSR offsets into `output_token_ids`; a row has either none or exactly `output_tokens`."""
    output_token_ids: UInt32Column | None = None
    """Exact output tokens, if the source has them."""
    accepted_draft_offsets: Int64Column | None = None
    """CSR offsets into `accepted_drafts`; a row without any uses the acceptance rates."""
    accepted_drafts: UInt32Column | None = None
    """With speculation: drafts accepted in the step whose first output has number p, at p modulo the row's count."""
    output_in_next: BoolColumn | None = None
    """If true, the next turn's prompt is this prompt, this output, and more."""
    queue_order: Int64Column | None = None
    """Order of requests of equal priority in a priority queue (ties: by name), if the source defines one."""
    abort_after_ns: Int64Column | None = None
    """Time from the arrival of a request until its client aborts it, ≥ 0; −1 for never."""
    strict_priority: Int64Column | None = None
    """Router tier (0 … 2^32−1)."""
    policy_class: Int32Column | None = None
    """Index into `policy_classes`, −1 for none."""
    policy_classes: tuple[str, ...] = ()
    """Names of the router's policy classes."""
    adapter: Int32Column | None = None
    """Index into `adapters`, −1 for the model itself."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters: equal prompts under different ones share no block."""
    request_ids: list[str] | None = None
    """Unique names of the requests, if the source has them."""
    session_ids: list[str] | None = None
    """Unique names of the sessions, if the source has them."""
    graph: RequestGraph | None = None
    """What requests wait for, where that is more than the turn before. `arrival_ns` is then the start of the play."""
    clamped_prompts: int = 0
    """Number of prompts that the reader shortened to their hash ids (`clamp_input_length`)."""
    dropped_hash_ids: int = 0
    """Number of hash ids past the end of their prompt that the reader dropped (`drop_surplus_hash_ids`)."""
    users: float = 1.0
    """Users relative to those of the source (`scale_users`)."""
    notes: tuple[str, ...] = ()
    """Sentences on what the source lacks; a report repeats them."""

    def __post_init__(self) -> None:
        if isinstance(self.trace_block_size, bool) or not isinstance(self.trace_block_size, int):
            raise InvalidArgument(f"trace_block_size must be an integer, got {self.trace_block_size!r}")
        if self.trace_block_size < 1:
            raise InvalidArgument(f"trace_block_size must be at least 1, got {self.trace_block_size}")
        arrival_ns = column("arrival_ns", self.arrival_ns, np.int64)
        rows = len(arrival_ns)
        self._set("arrival_ns", arrival_ns, np.int64, rows)
        self._set("prompt_tokens", self.prompt_tokens, np.int32, rows)
        self._set("output_tokens", self.output_tokens, np.int32, rows)
        self._set("hash_offsets", self.hash_offsets, np.int64, rows + 1)
        self._set("hash_ids", self.hash_ids, np.uint32, None)
        own_session = self.session is _ABSENT_INT32
        self._set("session", np.arange(rows) if own_session else self.session, np.int32, rows)
        for name in ("turn", "priority"):
            given = getattr(self, name)
            self._set(name, np.zeros(rows, np.int32) if given is _ABSENT_INT32 else given, np.int32, rows)
        no_delay = self.delay_ns is _ABSENT_INT64
        self._set("delay_ns", np.zeros(rows, np.int64) if no_delay else self.delay_ns, np.int64, rows)
        self._set_optional("elapsed_ns", np.int64, rows)
        self._set_optional("max_tokens", np.int32, rows)
        self._set_optional("output_token_offsets", np.int64, rows + 1)
        self._set_optional("output_token_ids", np.uint32, None)
        self._set_optional("accepted_draft_offsets", np.int64, rows + 1)
        self._set_optional("accepted_drafts", np.uint32, None)
        self._set_optional("output_in_next", np.bool_, rows)
        self._set_optional("queue_order", np.int64, rows)
        self._set_optional("abort_after_ns", np.int64, rows)
        self._set_optional("strict_priority", np.int64, rows)
        self._set_optional("policy_class", np.int32, rows)
        self._set_optional("adapter", np.int32, rows)

    def _set(self, name: str, values: ArrayLike, dtype: type[np.generic], rows: int | None) -> None:
        object.__setattr__(self, name, column(name, values, dtype, rows))

    def _set_optional(self, name: str, dtype: type[np.generic], rows: int | None) -> None:
        if getattr(self, name) is not None:
            self._set(name, getattr(self, name), dtype, rows)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_ns)

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return int(self.session.max()) + 1 if len(self) else 0

    @cached_property
    def next_turn(self) -> Int64Column:
        """Row of the following turn of the same session, −1 for a last turn."""
        return next_turn_rows(self.session)
