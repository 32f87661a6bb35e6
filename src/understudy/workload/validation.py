"""Check the invariants of a workload, once when it is constructed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy._core import first_other_prefix
from understudy.errors import InvalidArgument
from understudy.workload.columns import (
    BoolColumn,
    Int32Column,
    Int64Column,
    RowError,
    check_offsets,
    first_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from understudy.workload.request_columns import RequestColumns


def check_workload(workload: RequestColumns) -> None:
    """Raise InvalidArgument or RowError on the first broken invariant of `Workload`."""
    _check_minimum("prompt_tokens", workload.prompt_tokens, 1)
    _check_minimum("output_tokens", workload.output_tokens, 0)
    limit = workload.max_tokens
    if limit is not None:
        _fail_first(
            "max_tokens",
            (limit < 1) & (limit != -1),
            lambda row: f"must be at least 1 (or −1: none), got {limit[row]}",
        )
    if (workload.accepted_draft_offsets is None) != (workload.accepted_drafts is None):
        raise InvalidArgument("accepted_draft_offsets and accepted_drafts need each other; give both or none")
    if workload.accepted_draft_offsets is not None and workload.accepted_drafts is not None:
        check_offsets(
            "accepted_draft_offsets", workload.accepted_draft_offsets, len(workload.accepted_drafts)
        )
    _check_minimum("arrival_ns", workload.arrival_ns, 0)
    _check_minimum("delay_ns", workload.delay_ns, 0)
    _check_hash_ids(workload)
    _check_sessions(workload)
    _check_outputs(workload)
    _check_router_columns(workload)
    _check_graph(workload)
    check_names("request_ids", workload.request_ids, len(workload))
    check_names("session_ids", workload.session_ids, workload.sessions)


def _check_graph(workload: RequestColumns) -> None:
    graph = workload.graph
    if graph is None:
        return
    if len(graph) != len(workload):
        raise InvalidArgument(f"graph must have {len(workload)} rows, got {len(graph)}")
    if not len(graph):
        return
    _fail_first("delay_ns", workload.delay_ns != 0, lambda _: "must be 0: delays are those of the graph")
    _, firsts = np.unique(graph.play, return_index=True)
    start_ns = workload.arrival_ns[firsts][graph.play]
    _fail_first(
        "arrival_ns",
        workload.arrival_ns != start_ns,
        lambda row: f"must be the start of its play, {start_ns[row]}, got {workload.arrival_ns[row]}",
    )
    play = graph.play[workload.turn == 0][workload.session]
    _fail_first("session", graph.play != play, lambda _: "is in two plays")


def check_names(field: str, names: list[str] | None, count: int) -> None:
    """Raise unless there are `count` names and no two are equal."""
    if names is None:
        return
    if len(names) != count:
        raise InvalidArgument(f"{field} must have {count} entries, got {len(names)}")
    if len(set(names)) == count:
        return
    seen: dict[str, int] = {}
    for row, name in enumerate(names):
        if name in seen:
            raise RowError(field, row, f"{name!r} was already used by row {seen[name]}")
        seen[name] = row


def _fail_first(field: str, bad: BoolColumn, reason: Callable[[int], str]) -> None:
    row = first_row(bad)
    if row is not None:
        raise RowError(field, row, reason(row))


def _check_minimum(field: str, values: NDArray[np.integer], minimum: int) -> None:
    _fail_first(field, values < minimum, lambda row: f"must be at least {minimum}, got {values[row]}")


def _check_optional_time(field: str, times_ns: Int64Column) -> None:
    _fail_first(field, times_ns < -1, lambda row: f"must be at least 0, or −1 for none, got {times_ns[row]}")


def _check_hash_ids(workload: RequestColumns) -> None:
    check_offsets("hash_offsets", workload.hash_offsets, len(workload.hash_ids))
    size = workload.trace_block_size
    counts = np.diff(workload.hash_offsets)
    blocks = -(-workload.prompt_tokens.astype(np.int64) // size)
    _fail_first(
        "hash_ids",
        counts != blocks,
        lambda row: (
            f"must have {blocks[row]} ids for a prompt of {workload.prompt_tokens[row]} tokens "
            f"in blocks of {size}, got {counts[row]}"
        ),
    )


def _check_sessions(workload: RequestColumns) -> None:
    session, turn = workload.session, workload.turn
    firsts = np.flatnonzero(turn == 0)
    expected = np.arange(len(firsts))
    bad = first_row(session[firsts] != expected)
    if bad is not None:
        row = int(firsts[bad])
        raise RowError("session", row, f"must be {bad}, the next new session, got {session[row]}")
    _fail_first(
        "session",
        (session < 0) | (session >= len(firsts)),
        lambda row: f"must be one of the {len(firsts)} sessions that have a first turn, got {session[row]}",
    )
    if len(firsts) == len(session):
        order = expected
    else:
        order = np.argsort(session, kind="stable")
        starts = np.searchsorted(session[order], expected)
        place = np.empty(len(session), np.int64)
        place[order] = np.arange(len(session)) - starts[session[order]]
        _fail_first(
            "turn",
            turn != place,
            lambda row: f"must be {place[row]}, counting the rows of session {session[row]}, got {turn[row]}",
        )
    _fail_first(
        "delay_ns",
        (turn == 0) & (workload.delay_ns != 0),
        lambda row: f"must be 0 for a first turn, got {workload.delay_ns[row]}",
    )
    arrival_ns = workload.arrival_ns
    first_arrival_ns = arrival_ns[firsts][session]
    _fail_first(
        "arrival_ns",
        arrival_ns != first_arrival_ns,
        lambda row: (
            f"must be that of its session's first turn, {first_arrival_ns[row]}, got {arrival_ns[row]}"
        ),
    )
    if not workload.has_arrivals:
        _fail_first(
            "arrival_ns", arrival_ns != 0, lambda row: f"must be 0 without arrivals, got {arrival_ns[row]}"
        )


def _check_outputs(workload: RequestColumns) -> None:
    offsets, ids = workload.output_token_offsets, workload.output_token_ids
    if (offsets is None) != (ids is None):
        raise InvalidArgument("output_token_offsets and output_token_ids need each other; give both or none")
    in_next = workload.output_in_next
    if offsets is not None and ids is not None:
        check_offsets("output_token_offsets", offsets, len(ids))
        counts = np.diff(offsets)
        _fail_first(
            "output_token_ids",
            (counts != 0) & (counts != workload.output_tokens),
            lambda row: (
                f"must have one entry per output token, {workload.output_tokens[row]}, got {counts[row]}"
            ),
        )
        if in_next is not None:
            _fail_first(
                "output_in_next", in_next & (counts != 0), lambda _: "contradicts the row's output_token_ids"
            )
    if in_next is not None and in_next.any():
        _check_continuations(workload, np.flatnonzero(in_next))


def _check_continuations(workload: RequestColumns, rows: Int64Column) -> None:
    """Check that each next prompt begins with this prompt and has room for this output."""
    following = workload.next_turn[rows]
    bad = first_row(following < 0)
    if bad is not None:
        raise RowError("output_in_next", int(rows[bad]), "needs a following turn in the session")
    prompt = workload.prompt_tokens.astype(np.int64)
    needed = prompt[rows] + workload.output_tokens[rows]
    bad = first_row(prompt[following] < needed)
    if bad is not None:
        raise RowError(
            "output_in_next",
            int(rows[bad]),
            f"needs a next prompt of at least {needed[bad]} tokens (this prompt and output), "
            f"got {prompt[following[bad]]}",
        )
    starts = workload.hash_offsets[:-1]
    counts = np.diff(workload.hash_offsets)[rows]
    bad = first_other_prefix(workload.hash_ids, starts[rows], starts[following], counts)
    if bad >= 0:
        raise RowError(
            "output_in_next", int(rows[bad]), "needs a next prompt that begins with this row's hash ids"
        )


def _check_router_columns(workload: RequestColumns) -> None:
    for name in ("elapsed_ns", "abort_after_ns"):
        times: Int64Column | None = getattr(workload, name)
        if times is not None:
            _check_optional_time(name, times)
    strict = workload.strict_priority
    if strict is not None:
        _fail_first(
            "strict_priority",
            (strict < 0) | (strict >= 2**32),
            lambda row: f"must lie in 0 … 2^32−1, got {strict[row]}",
        )
    _check_named("policy_class", workload.policy_class, "policy_classes", workload.policy_classes)
    _check_named("adapter", workload.adapter, "adapters", workload.adapters)


def _check_named(name: str, column: Int32Column | None, plural: str, names: tuple[str, ...]) -> None:
    if (column is None) != (not names):
        raise InvalidArgument(f"{name} and {plural} need each other; give both or none")
    check_names(plural, list(names), len(names))
    if column is not None:
        _fail_first(
            name,
            (column < -1) | (column >= len(names)),
            lambda row: f"must be −1 or an index below {len(names)}, got {column[row]}",
        )
