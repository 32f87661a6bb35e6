"""Guess the format of a trace file: where none is given, and for the error message when the given one does not fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from understudy.errors import InvalidArgument
from understudy.workload.files import STDIN, open_trace
from understudy.workload.server_log import SERVER_LOG
from understudy.workload.table_columns import looks_like_header, names_lengths

if TYPE_CHECKING:
    from pathlib import Path

_START_BYTES = 16_384
_MARKS = (
    ("agentic-mooncake", r'"dynamo\.agentic_mooncake"'),
    ("dynamo", r'"dynamo\.request\.trace\.v1"'),
    ("weka", r'"requests"\s*:\s*\['),
    ("dag-jsonl", r'"turns"\s*:\s*\[|"orchestrator"\s*:\s*true'),
    ("mooncake-delta", r'"group_id"\s*:'),
    ("mooncake", r'"hash_ids"\s*:'),
    ("applied-compute", r'"assistant_response_length"\s*:'),
    ("sharegpt", r'^\s*\[\s*\{.*"conversations"\s*:'),
    ("aiperf", r'"request_start_ns"\s*:'),
    ("vllm-bench", r'^\s*\{.*"(input_lens|output_lens|request_throughput)"\s*:'),
    ("openai", r'"(messages|prompt|request_body)"\s*:|"input"\s*:\s*[\[{"].*"(startTime|usageDetails)"\s*:'),
    ("server-log", SERVER_LOG),
    ("azure", r"^TIMESTAMP,"),
    ("burstgpt", r"^Timestamp,.*Request tokens"),
)
"""Pattern at the start of a file of each format, the most specific first."""


def guess_format(path: Path) -> str | None:
    """Return the format whose pattern the file matches; None without a match, or for standard input."""
    if str(path) == STDIN:
        return None
    if path.is_dir():
        names = sorted(one for one in path.rglob("*") if one.is_file())
        return guess_format(names[0]) if names else None
    try:
        with open_trace(path) as file:
            start = file.read(_START_BYTES).decode("utf-8", "ignore")
    except InvalidArgument:
        return None
    found = next((name for name, mark in _MARKS if re.search(mark, start, re.DOTALL)), None)
    return found or _guess_table(start)


def _guess_table(start: str) -> str | None:
    """Return the format of lengths without content: rows of ours, or a table."""
    if start.startswith("PAR1"):
        return "table"
    first = start.lstrip().partition("\n")[0]
    if not first.startswith("{"):
        return "table" if looks_like_header(first) else None
    names = re.findall(r'"(\w+)"\s*:', first)
    if set(names) - {"notes"} <= {"timestamp", "input_length", "output_length"} and "input_length" in names:
        return "lengths"
    return "table" if names_lengths(names) else None
