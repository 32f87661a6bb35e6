"""`Workload`: the requests of a replay, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np

from understudy._core import xxh3_64
from understudy.checks import positive_number, whole_number
from understudy.errors import ConfigError, InvalidArgument
from understudy.workload.columns import (
    Int32Column,
    Int64Column,
    UInt32Column,
    column,
    intern_ids,
    next_turn_rows,
    take_ragged,
)
from understudy.workload.request_columns import RequestColumns
from understudy.workload.validation import check_workload

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_EXACT_DOUBLE = 2**53

_Scalar = TypeVar("_Scalar", bound=np.generic)


class WorkloadFacts(TypedDict):
    """Facts about a workload, as `RunFacts` names them."""

    workload: str
    workload_digest: str
    trace_block_size: int
    users: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload(RequestColumns):
    """Requests as columns: row i of each describes request i. Arrays are read-only; transformations copy.

    Sessions: every request is a turn of a session. Sessions are numbered by first appearance and the turns of a
    session are in row order, so a single-turn workload has session = 0, 1, 2, … and turn = 0. A first turn arrives
    at `arrival_ns`; turn k becomes ready `delay_ns` after turn k−1 completed. A later turn has the `arrival_ns` of
    its session's first turn.

    Graphs: with a `graph`, that says what each request waits for, and `arrival_ns` is the start of its play; there are
    no delays besides those of the graph.

    Content: token p of a prompt is `hash_ids[hash_offsets[i] + p // trace_block_size]`: equal ids at equal
    positions are equal tokens. A row has exactly as many ids as its prompt has blocks; the last may be partly
    used. Readers number the ids from 0; gaps are allowed.

    Output tokens of row i are the exact `output_token_ids` if the row has them; the tokens at their positions in the
    next turn's prompt if `output_in_next[i]`; else unique to the request. A row has at most one of the first two.

    The constructor accepts array-likes and raises InvalidArgument or RowError, naming field and row, for
    inconsistent columns.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workload(self)

    @property
    def has_aborts(self) -> bool:
        """Whether the client of any request aborts it."""
        return self.abort_after_ns is not None and bool((self.abort_after_ns >= 0).any())

    @property
    def total_prompt_tokens(self) -> int:
        """Sum of the prompt lengths."""
        return int(self.prompt_tokens.sum(dtype=np.int64))

    @property
    def total_output_tokens(self) -> int:
        """Sum of the output lengths."""
        return int(self.output_tokens.sum(dtype=np.int64))

    @property
    def cut_output_tokens(self) -> Int32Column:
        """Output lengths after applying `max_tokens`."""
        if self.max_tokens is None:
            return self.output_tokens
        return np.where(
            self.max_tokens < 0, self.output_tokens, np.minimum(self.output_tokens, self.max_tokens)
        )

    @property
    def token_space(self) -> int:
        """Largest token id of prompts and exact outputs plus one; 0 without any."""
        largest = [
            int(ids.max()) for ids in (self.hash_ids, self.output_token_ids) if ids is not None and len(ids)
        ]
        return max(largest, default=-1) + 1

    def describe(self, name: str) -> WorkloadFacts:
        """Return the workload's part of a run's facts."""
        return {
            "workload": name,
            "workload_digest": self.digest,
            "trace_block_size": self.trace_block_size,
            "users": None if self.users == 1 else self.users,
            "notes": self.notes,
        }

    @cached_property
    def digest(self) -> str:
        """Hash of the requests that a replay sends, independent of the file and format they came from."""
        value = self.trace_block_size
        for each in fields(self):
            content = getattr(self, each.name)
            if isinstance(content, np.ndarray) and each.name != "elapsed_ns":
                value = xxh3_64(each.name.encode(), value)
                value = xxh3_64(content.tobytes(), value)
        for name, content in [] if self.graph is None else self.graph.columns():
            value = xxh3_64(name.encode(), value)
            value = xxh3_64(content.tobytes(), value)
        return f"{value:016x}"

    def prompt_hash_ids(self, row: int) -> UInt32Column:
        """Return the hash ids of one prompt, as a view."""
        return self.hash_ids[self.hash_offsets[row] : self.hash_offsets[row + 1]]

    def known_output_tokens(self, row: int) -> UInt32Column | None:
        """Return the known output tokens of `row`; None if they are unique to the request."""
        length = int(self.output_tokens[row])
        if self.output_token_ids is not None and self.output_token_offsets is not None:
            begin, end = self.output_token_offsets[row], self.output_token_offsets[row + 1]
            if end > begin or length == 0:
                return self.output_token_ids[begin:end]
        if self.output_in_next is None or not self.output_in_next[row]:
            return None
        positions = np.arange(length) + int(self.prompt_tokens[row])
        return self.prompt_hash_ids(int(self.next_turn[row]))[positions // self.trace_block_size]

    def limited(self, max_tokens: int) -> Workload:
        """Set `max_tokens` on every request without a limit.

        Errors: ConfigError unless it is at least 1.
        """
        max_tokens = whole_number("max_tokens", max_tokens, 1, 2**31 - 1)
        own = np.full(len(self), -1, np.int32) if self.max_tokens is None else self.max_tokens
        return replace(self, max_tokens=np.where(own < 0, np.int32(max_tokens), own))

    def normalised(self) -> Workload:
        """Shift the arrivals so that the first is 0."""
        if not len(self) or not (first := self.arrival_ns.min()):
            return self
        return replace(self, arrival_ns=self.arrival_ns - first)

    def scale_arrival_rate(self, ratio: float) -> Workload:
        """Divide all times by `ratio`, each rounded once to a whole nanosecond (half to even).

        Errors: ConfigError unless `ratio` is finite and above 0, or if a time is or becomes too large to be exact.
        """
        positive_number("arrival_rate_scale", ratio, remedy="1 leaves the times as they are, 2 halves them")
        if ratio == 1:
            return self
        arrival_ns = _divide("arrival_ns", self.arrival_ns, ratio)
        elapsed_ns = self.elapsed_ns
        if elapsed_ns is not None:
            elapsed_ns = np.where(elapsed_ns < 0, -1, _divide("elapsed_ns", elapsed_ns, ratio))
        delay_ns = _divide("delay_ns", self.delay_ns, ratio)
        graph = self.graph
        if graph is not None:
            graph = replace(
                graph,
                not_before_ns=_divide("not_before_ns", graph.not_before_ns, ratio),
                dependency_delay_ns=_divide("dependency_delay_ns", graph.dependency_delay_ns, ratio),
            )
        return replace(self, arrival_ns=arrival_ns, delay_ns=delay_ns, elapsed_ns=elapsed_ns, graph=graph)

    def sorted_by_arrival(self) -> Workload:
        """Sort the rows by arrival; rows with equal arrivals, such as turns of a session, keep their order.

        Errors: InvalidArgument if the workload has no arrivals.
        """
        order = self.arrival_order()
        return self if order is None else self.take(order)

    def arrival_order(self) -> Int64Column | None:
        """Return the row order of `sorted_by_arrival`; None if the rows are already sorted. Errors as there."""
        if not self.has_arrivals:
            raise InvalidArgument("the workload has no arrivals to sort by; run it closed loop")
        if bool((self.arrival_ns[1:] >= self.arrival_ns[:-1]).all()):
            return None
        return np.argsort(self.arrival_ns, kind="stable")

    def head(self, requests: int) -> Workload:
        """Keep the first `requests` rows (all rows if there are fewer)."""
        if requests < 0:
            raise InvalidArgument(f"requests must be at least 0, got {requests}")
        return self.take(np.arange(min(requests, len(self))))

    def take(self, rows: ArrayLike) -> Workload:
        """Keep these rows, in this order; sessions are renumbered, hash ids are not.

        Errors: InvalidArgument for a row that does not exist or is repeated, or for a session whose turns would be
        incomplete or out of order.
        """
        index = column("rows", rows, np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < len(self)):
            raise InvalidArgument(f"rows must lie in 0 … {len(self) - 1}, got {index.min()} … {index.max()}")
        hash_offsets, hash_ids = take_ragged(self.hash_offsets, self.hash_ids, index)
        old_session = self.session[index]
        session = intern_ids(old_session).astype(np.int32)
        output_offsets, output_ids = self.output_token_offsets, self.output_token_ids
        if output_offsets is not None and output_ids is not None:
            output_offsets, output_ids = take_ragged(output_offsets, output_ids, index)
        draft_offsets, drafts = self.accepted_draft_offsets, self.accepted_drafts
        if draft_offsets is not None and drafts is not None:
            draft_offsets, drafts = take_ragged(draft_offsets, drafts, index)
        output_in_next = _pick(self.output_in_next, index)
        if output_in_next is not None:  # a turn whose next turn was dropped has an unknown output
            output_in_next = output_in_next & (next_turn_rows(session) >= 0)
        session_ids = self.session_ids
        if session_ids is not None:
            firsts = np.flatnonzero(self.turn[index] == 0)
            session_ids = [session_ids[old_session[row]] for row in firsts]
        request_ids = self.request_ids
        if request_ids is not None:
            request_ids = [request_ids[row] for row in index]
        return replace(
            self,
            arrival_ns=self.arrival_ns[index],
            prompt_tokens=self.prompt_tokens[index],
            output_tokens=self.output_tokens[index],
            hash_offsets=hash_offsets,
            hash_ids=hash_ids,
            session=session,
            turn=self.turn[index],
            delay_ns=self.delay_ns[index],
            elapsed_ns=_pick(self.elapsed_ns, index),
            priority=self.priority[index],
            max_tokens=_pick(self.max_tokens, index),
            output_token_offsets=output_offsets,
            output_token_ids=output_ids,
            accepted_draft_offsets=draft_offsets,
            accepted_drafts=drafts,
            output_in_next=output_in_next,
            queue_order=_pick(self.queue_order, index),
            abort_after_ns=_pick(self.abort_after_ns, index),
            strict_priority=_pick(self.strict_priority, index),
            policy_class=_pick(self.policy_class, index),
            adapter=_pick(self.adapter, index),
            request_ids=request_ids,
            session_ids=session_ids,
            graph=None if self.graph is None else self.graph.take(index),
        )


def _pick(values: NDArray[_Scalar] | None, index: Int64Column) -> NDArray[_Scalar] | None:
    return None if values is None else values[index]


def _divide(name: str, times_ns: Int64Column, ratio: float) -> Int64Column:
    longest = int(times_ns.max(initial=0))
    if longest > _EXACT_DOUBLE:
        raise ConfigError(
            f"arrival_rate_scale: {name} reaches {longest} ns, past 2^53; call normalised() first"
        )
    if longest / ratio >= 2**63:
        raise ConfigError(f"arrival_rate_scale {ratio} moves {name} past 2^63 ns; raise it")
    return np.rint(times_ns / ratio).astype(np.int64)
