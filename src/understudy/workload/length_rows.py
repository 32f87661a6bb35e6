"""Rows of lengths: a compact trace of requests whose prompts share nothing.

`{"timestamp": 12.5, "input_length": 900, "output_length": 120}` per line, in ms; without `hash_ids`, which would be one
number per block that occurs once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.checks import whole_number
from understudy.errors import InvalidArgument
from understudy.workload.files import create_trace, open_trace
from understudy.workload.progress import report_progress
from understudy.workload.table import BLOCK
from understudy.workload.text import unique_ids
from understudy.workload.times import milliseconds_to_ns
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    import os
    from pathlib import Path

_ROWS_AT_ONCE = 50_000


class _Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    input_length: int
    output_length: int
    timestamp: float | None = None
    notes: list[str] | None = None


def read_lengths(path: Path, *, trace_block_size: int = BLOCK) -> Workload:
    """Read rows of lengths, in file order, as blocks of `trace_block_size` tokens that occur once.

    Errors: InvalidArgument `FILE:LINE: …`.
    """
    trace_block_size = whole_number("trace_block_size", trace_block_size, 1)
    decoder = msgspec.json.Decoder(_Row)
    rows: list[_Row] = []
    with open_trace(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise InvalidArgument(f"{path}:{number}: {error}") from error
            if not 0 < row.input_length < 2**31 or not 0 <= row.output_length < 2**31:
                raise InvalidArgument(
                    f"{path}:{number}: input_length must be from 1, and output_length from 0, to 2^31-1"
                )
            rows.append(row)
    has_times = bool(rows) and rows[0].timestamp is not None
    if (
        odd := next((n for n, row in enumerate(rows, 1) if (row.timestamp is not None) != has_times), None)
    ) is not None:
        raise InvalidArgument(f"{path}: row {odd}: give all rows a timestamp, or none")
    times_ms = np.array([row.timestamp or 0.0 for row in rows], np.float64)
    if len(times_ms) and not (times_ms.min() >= 0 and times_ms.max() < 2**63 / 1e6):
        raise InvalidArgument(f"{path}: a timestamp must be a number of ms from 0")
    prompts = np.array([row.input_length for row in rows], np.int64)
    offsets, ids = unique_ids(prompts, trace_block_size)
    return Workload(
        arrival_ns=milliseconds_to_ns(times_ms),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=np.array([row.output_length for row in rows], np.int64),
        hash_offsets=offsets,
        hash_ids=ids,
        trace_block_size=trace_block_size,
        has_arrivals=has_times or not rows,
        notes=tuple(note for row in rows[:1] for note in row.notes or ()),
    )


def is_lengths_only(workload: Workload) -> bool:
    """Whether rows of lengths are the whole workload: no prompt shares a block, and nothing else is set."""
    optional = (
        *("graph", "queue_order", "max_tokens", "output_token_ids", "accepted_drafts", "abort_after_ns"),
        *("strict_priority", "policy_class", "adapter", "request_ids", "session_ids", "output_in_next"),
    )
    return (
        all(getattr(workload, name) is None for name in optional)
        and workload.trace_block_size == BLOCK
        and not workload.turn.any()
        and not workload.priority.any()
        and bool((np.diff(workload.hash_ids.astype(np.int64)) > 0).all())
    )


def write_lengths(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write a workload of lengths in row order. InvalidArgument if it is more than that, or cannot be written."""
    if not is_lengths_only(workload):
        raise InvalidArgument("prompts share content, or have more than lengths; write a Mooncake trace")
    encoder = msgspec.json.Encoder()
    times = (workload.arrival_ns / 1e6).tolist() if workload.has_arrivals else [None] * len(workload)
    columns = zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), times, strict=True)
    rows = [_Row(prompt, output, time) for prompt, output, time in columns]
    if rows and workload.notes:
        rows[0].notes = list(workload.notes)
    with create_trace(path) as file:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            file.write(encoder.encode_lines(rows[start : start + _ROWS_AT_ONCE]))
            report_progress("writing", min(start + _ROWS_AT_ONCE, len(rows)), len(rows))
