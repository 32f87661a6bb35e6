"""Combine workloads: concatenate several, or repeat one."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.graph import RequestGraph, concat_graphs
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.workload.columns import BoolColumn, Int32Column, Int64Column, UInt32Column

_T = TypeVar("_T")


def concat(workloads: Sequence[Workload], *, shared_prefixes: bool = False) -> Workload:
    """Concatenate workloads row by row; arrivals stay as they are (see `sorted_by_arrival`).

    With `shared_prefixes` equal hash ids mean equal content across the parts; without, each part's token ids
    (exact outputs included) are renumbered, so that no part can hit what another cached.

    Errors: InvalidArgument if there is no part, if the parts differ in trace_block_size or in optional columns
    (arrivals, names, queue_order) or in `users`, if two names are equal, or if the token ids do not fit 32 bits.
    """
    if not workloads:
        raise InvalidArgument("concat needs at least one workload")
    size = _require_equal("trace_block_size", [part.trace_block_size for part in workloads])
    has_arrivals = _require_equal("has_arrivals", [part.has_arrivals for part in workloads])
    users = _require_equal("users", [part.users for part in workloads])
    for name in ("request_ids", "session_ids", "queue_order", "graph"):
        _require_equal(f"presence of {name}", [getattr(part, name) is not None for part in workloads])
    spaces = [0 if shared_prefixes else part.token_space for part in workloads]
    if sum(spaces) >= 2**32:
        raise InvalidArgument(
            f"concat needs {sum(spaces)} token ids, more than fit 32 bits; use shared_prefixes"
        )
    token_bases = _offsets(spaces)
    hash_bases = _offsets([len(part.hash_ids) for part in workloads])
    session_bases = _offsets([part.sessions for part in workloads])
    policy_class, policy_classes = _concat_named(
        [(part.policy_class, part.policy_classes, len(part)) for part in workloads]
    )
    adapter, adapters = _concat_named([(part.adapter, part.adapters, len(part)) for part in workloads])
    graphs = [part.graph for part in workloads if part.graph is not None]
    output_offsets, output_ids = _concat_outputs(workloads, token_bases)
    draft_offsets, drafts = _concat_drafts(workloads)
    return Workload(
        arrival_ns=np.concatenate([part.arrival_ns for part in workloads]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in workloads]),
        output_tokens=np.concatenate([part.output_tokens for part in workloads]),
        hash_offsets=np.concatenate(
            [np.zeros(1, np.int64)]
            + [part.hash_offsets[1:] + base for part, base in zip(workloads, hash_bases, strict=True)]
        ),
        hash_ids=np.concatenate(
            [part.hash_ids + np.uint32(base) for part, base in zip(workloads, token_bases, strict=True)]
        ),
        trace_block_size=size,
        has_arrivals=has_arrivals,
        session=np.concatenate(
            [part.session + np.int32(base) for part, base in zip(workloads, session_bases, strict=True)]
        ),
        turn=np.concatenate([part.turn for part in workloads]),
        delay_ns=np.concatenate([part.delay_ns for part in workloads]),
        elapsed_ns=_concat_filled("elapsed_ns", -1, workloads),
        priority=np.concatenate([part.priority for part in workloads]),
        max_tokens=_concat_limits(workloads),
        output_token_offsets=output_offsets,
        output_token_ids=output_ids,
        accepted_draft_offsets=draft_offsets,
        accepted_drafts=drafts,
        output_in_next=_concat_flags(workloads),
        queue_order=_concat_order(workloads),
        abort_after_ns=_concat_filled("abort_after_ns", -1, workloads),
        strict_priority=_concat_filled("strict_priority", 0, workloads),
        policy_class=policy_class,
        policy_classes=policy_classes,
        adapter=adapter,
        adapters=adapters,
        request_ids=_concat_names([part.request_ids for part in workloads]),
        session_ids=_concat_names([part.session_ids for part in workloads]),
        graph=None if workloads[0].graph is None else concat_graphs(graphs),
        clamped_prompts=sum(part.clamped_prompts for part in workloads),
        dropped_hash_ids=sum(part.dropped_hash_ids for part in workloads),
        users=users,
        notes=tuple(dict.fromkeys(note for part in workloads for note in part.notes)),
    )


def repeat(workload: Workload, times: int, *, gap_ns: int = 0, shared_prefixes: bool = False) -> Workload:
    """Repeat the workload `times` times, each copy `gap_ns` after the last arrival of the one before.

    Copies after the first append `#1`, `#2`, … to the names. `shared_prefixes` as in `concat`.

    Errors: InvalidArgument if times < 1, gap_ns < 0, a gap is given without arrivals, or the last copy
    arrives past 2^63 ns.
    """
    if times < 1:
        raise InvalidArgument(f"times must be at least 1, got {times}")
    if gap_ns < 0:
        raise InvalidArgument(f"gap_ns must be at least 0, got {gap_ns}")
    if gap_ns and not workload.has_arrivals:
        raise InvalidArgument("gap_ns has no effect on a workload without arrivals; leave it out")
    last_ns = int(workload.arrival_ns.max(initial=0))
    period_ns = last_ns - (int(workload.arrival_ns.min()) if len(workload) else 0) + gap_ns
    if last_ns + period_ns * (times - 1) >= 2**63:
        raise InvalidArgument(f"{times} copies of {period_ns} ns reach past 2^63 ns; call normalised() first")
    return concat(
        [workload]
        + [
            replace(
                workload,
                arrival_ns=workload.arrival_ns + copy * period_ns,
                request_ids=_append_suffix(workload.request_ids, copy),
                session_ids=_append_suffix(workload.session_ids, copy),
                graph=_rename_plays(workload.graph, copy),
            )
            for copy in range(1, times)
        ],
        shared_prefixes=shared_prefixes,
    )


def _require_equal(what: str, values: list[_T]) -> _T:
    for part, value in enumerate(values):
        if value != values[0]:
            raise InvalidArgument(f"concat: {what} is {values[0]} in part 0 but {value} in part {part}")
    return values[0]


def _offsets(sizes: list[int]) -> list[int]:
    return list(accumulate(sizes[:-1], initial=0))


def _append_suffix(names: list[str] | None, copy: int) -> list[str] | None:
    return None if names is None else [f"{name}#{copy}" for name in names]


def _rename_plays(graph: RequestGraph | None, copy: int) -> RequestGraph | None:
    return None if graph is None else replace(graph, play_ids=_append_suffix(graph.play_ids, copy))


def _concat_names(parts: list[list[str] | None]) -> list[str] | None:
    names: list[str] = []
    for part in parts:
        if part is None:
            return None
        names += part
    return names


def _concat_outputs(
    workloads: Sequence[Workload], token_bases: list[int]
) -> tuple[Int64Column | None, UInt32Column | None]:
    if all(part.output_token_ids is None for part in workloads):
        return None, None
    offsets, ids = [np.zeros(1, np.int64)], [np.empty(0, np.uint32)]
    end = 0
    for part, base in zip(workloads, token_bases, strict=True):
        if part.output_token_ids is None or part.output_token_offsets is None:
            offsets.append(np.full(len(part), end))
        else:
            offsets.append(part.output_token_offsets[1:] + end)
            ids.append(part.output_token_ids + np.uint32(base))
            end += len(part.output_token_ids)
    return np.concatenate(offsets), np.concatenate(ids)


def _concat_drafts(workloads: Sequence[Workload]) -> tuple[Int64Column | None, UInt32Column | None]:
    if all(part.accepted_drafts is None for part in workloads):
        return None, None
    offsets, drafts = [np.zeros(1, np.int64)], [np.empty(0, np.uint32)]
    end = 0
    for part in workloads:
        if part.accepted_drafts is None or part.accepted_draft_offsets is None:
            offsets.append(np.full(len(part), end))
        else:
            offsets.append(part.accepted_draft_offsets[1:] + end)
            drafts.append(part.accepted_drafts)
            end += len(part.accepted_drafts)
    return np.concatenate(offsets), np.concatenate(drafts)


def _concat_flags(workloads: Sequence[Workload]) -> BoolColumn | None:
    if all(part.output_in_next is None for part in workloads):
        return None
    return np.concatenate(
        [
            np.zeros(len(part), bool) if part.output_in_next is None else part.output_in_next
            for part in workloads
        ]
    )


def _concat_limits(workloads: Sequence[Workload]) -> Int32Column | None:
    if all(part.max_tokens is None for part in workloads):
        return None
    return np.concatenate(
        [
            np.full(len(part), -1, np.int32) if part.max_tokens is None else part.max_tokens
            for part in workloads
        ]
    )


def _concat_order(workloads: Sequence[Workload]) -> Int64Column | None:
    orders = [part.queue_order for part in workloads if part.queue_order is not None]
    return np.concatenate(orders) if orders else None


def _concat_filled(name: str, absent: int, workloads: Sequence[Workload]) -> Int64Column | None:
    """Concatenate an optional column, with the value `absent` for parts without it."""
    parts = [getattr(part, name) for part in workloads]
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [
            np.full(len(workload), absent, np.int64) if part is None else part
            for workload, part in zip(workloads, parts, strict=True)
        ]
    )


def _concat_named(
    parts: Sequence[tuple[Int32Column | None, tuple[str, ...], int]],
) -> tuple[Int32Column | None, tuple[str, ...]]:
    """Concatenate index columns, each with its own names, into one column and one tuple of names."""
    names = tuple(dict.fromkeys(name for _, own, _ in parts for name in own))
    if not names:
        return None, ()
    columns = []
    for column, own, rows in parts:
        if column is None:
            columns.append(np.full(rows, -1, np.int32))
        else:  # index −1 (no name) looks up the last entry, which is −1 again
            lookup = np.array([*(names.index(name) for name in own), -1], np.int32)
            columns.append(lookup[column])
    return np.concatenate(columns), names
