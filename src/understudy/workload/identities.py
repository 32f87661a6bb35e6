"""Block identities of a workload's rows, as engines compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import trace_identities

if TYPE_CHECKING:
    from understudy._core import Identities
    from understudy.workload.workload import Workload


def row_identities(workload: Workload, row: int, block_size: int, count: int) -> Identities:
    """Return the identities of the first `count` blocks of prompt and output; unknown output is unique."""
    prompt, output = int(workload.prompt_tokens[row]), int(workload.output_tokens[row])
    quoted = workload.output_in_next is not None and bool(workload.output_in_next[row])
    known = None if quoted else workload.known_output_tokens(row)
    return trace_identities(
        workload.prompt_hash_ids(int(workload.next_turn[row]) if quoted else row),
        workload.trace_block_size,
        prompt + (output if quoted else 0),
        workload.hash_ids[:0] if known is None else known,
        block_size,
        row,
        count,
        0 if workload.adapter is None else int(workload.adapter[row]) + 1,
    )
