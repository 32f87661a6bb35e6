"""Write a workload as Mooncake JSONL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.columns import Int64Column, UInt32Column, first_row, intern_ids
from understudy.workload.files import create_trace
from understudy.workload.progress import report_progress
from understudy.workload.times import milliseconds_to_ns

if TYPE_CHECKING:
    import os

    from understudy.workload.workload import Workload

_ROWS_AT_ONCE = 10_000


def write_mooncake(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write `workload` in row order, gzipped if the name ends in `.gz`; equal workloads give equal bytes.

    Reading it back with the same trace_block_size gives equal columns, except for names: readers number hash
    ids by first appearance (a workload with exact outputs and another numbering is renumbered here, so that equal
    tokens stay equal), and a multi-turn session without a name is written as `session_<index>`.

    Errors: InvalidArgument, before anything is written, if a time is not exact in milliseconds; or if the file
    cannot be written.
    """
    if workload.graph is not None:
        raise InvalidArgument(
            "requests that wait for one another cannot be written in a Mooncake trace; write agentic-mooncake "
            "(--to agentic-mooncake)"
        )
    if workload.queue_order is not None:
        raise InvalidArgument("queue_order cannot be written in a Mooncake trace")
    rows = _Rows(workload)
    encoder = msgspec.json.Encoder()
    with create_trace(path) as file:
        for start in range(0, len(workload), _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, len(workload))
            file.write(encoder.encode_lines([rows.row(row) for row in range(start, end)]))
            report_progress("writing", end, len(workload))


class _Rows:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._timestamp_ms = _milliseconds("arrival_ns", workload.arrival_ns)
        self._delay_ms = _milliseconds("delay_ns", workload.delay_ns)
        elapsed = workload.elapsed_ns
        self._elapsed_ms = None if elapsed is None else _milliseconds("elapsed_ns", np.maximum(elapsed, 0))
        aborts = workload.abort_after_ns
        self._abort_ms = None if aborts is None else _milliseconds("abort_after_ns", np.maximum(aborts, 0))
        self._hash_ids, self._output_ids = _number_by_appearance(workload)
        self._turns = np.bincount(workload.session, minlength=1)

    def row(self, row: int) -> dict[str, Any]:
        """Return the row as in the file, without keys that have their default."""
        w = self._workload
        first = w.turn[row] == 0
        session = int(w.session[row])
        result: dict[str, Any] = {}
        if w.has_arrivals and first:
            result["timestamp"] = self._timestamp_ms[row]
        result["input_length"] = int(w.prompt_tokens[row])
        result["output_length"] = int(w.output_tokens[row])
        if w.max_tokens is not None and w.max_tokens[row] > 0:
            result["max_tokens"] = int(w.max_tokens[row])
        result["hash_ids"] = self._hash_ids[w.hash_offsets[row] : w.hash_offsets[row + 1]].tolist()
        if w.session_ids is not None:
            result["session_id"] = w.session_ids[session]
        elif self._turns[session] > 1:
            result["session_id"] = f"session_{session}"
        if not first:
            result["delay"] = self._delay_ms[row]
            if w.elapsed_ns is not None and self._elapsed_ms is not None and w.elapsed_ns[row] >= 0:
                result["elapsed_ms"] = self._elapsed_ms[row]
        if w.request_ids is not None:
            result["request_id"] = w.request_ids[row]
        if w.priority[row]:
            result["priority"] = int(w.priority[row])
        if w.abort_after_ns is not None and self._abort_ms is not None and w.abort_after_ns[row] >= 0:
            result["abort_after_ms"] = self._abort_ms[row]
        if w.strict_priority is not None and w.strict_priority[row]:
            result["strict_priority"] = int(w.strict_priority[row])
        if w.policy_class is not None and w.policy_class[row] >= 0:
            result["policy_class"] = w.policy_classes[w.policy_class[row]]
        if w.adapter is not None and w.adapter[row] >= 0:
            result["lora"] = w.adapters[w.adapter[row]]
        if self._output_ids is not None and w.output_token_offsets is not None:
            tokens = self._output_ids[w.output_token_offsets[row] : w.output_token_offsets[row + 1]]
            if len(tokens):
                result["output_token_ids"] = tokens.tolist()
        if w.accepted_drafts is not None and w.accepted_draft_offsets is not None:
            drafts = w.accepted_drafts[w.accepted_draft_offsets[row] : w.accepted_draft_offsets[row + 1]]
            if len(drafts):
                result["accepted_drafts"] = drafts.tolist()
        if w.output_in_next is not None and w.output_in_next[row]:
            result["output_in_next_turn"] = True
        if row == 0 and w.notes:  # a key of a row, because other readers of the format skip keys, not lines
            result["notes"] = list(w.notes)
        return result


def _number_by_appearance(workload: Workload) -> tuple[UInt32Column, UInt32Column | None]:
    hash_ids, outputs = workload.hash_ids, workload.output_token_ids
    if outputs is None or np.array_equal(intern_ids(hash_ids), hash_ids):
        return hash_ids, outputs
    renamed = intern_ids(np.concatenate([hash_ids, outputs]))
    return renamed[: len(hash_ids)], renamed[len(hash_ids) :]


def _milliseconds(field: str, times_ns: Int64Column) -> list[int | float]:
    times_ms = times_ns / 1e6
    bad = first_row(milliseconds_to_ns(times_ms) != times_ns)
    if bad is not None:
        raise InvalidArgument(
            f"{field}[{bad}] = {times_ns[bad]} has no exact value in milliseconds; call normalised() first"
        )
    return [int(time_ms) if time_ms == int(time_ms) else time_ms for time_ms in times_ms.tolist()]
