"""What `understudy replay` writes: requests as lines. Reports have means, and are refused."""

from __future__ import annotations

from typing import Any

from understudy.calibrate.benchmark import Benchmark, Fields
from understudy.calibrate.readers.single_requests import of_requests
from understudy.errors import InvalidArgument


def is_report(content: dict[str, Any]) -> bool:
    """Whether these are the keys of a report."""
    return "ttft_ms" in content and "run" in content


def is_request(row: dict[str, Any]) -> bool:
    """Whether these are the keys of a line of `--requests-jsonl`."""
    return {"arrival_ms", "ttft_ms", "output_tokens"} <= row.keys()


def read_requests(source: tuple[str, str], where: str, rows: list[dict[str, Any]]) -> list[Benchmark]:
    """Requests that completed, by when they arrived."""
    columns: list[tuple[float, float, float, float, float]] = []
    for number, row in enumerate(rows, 1):
        fields = Fields(f"{where}:{number}", row)
        if row.get("status", "completed") != "completed":
            raise InvalidArgument(
                f"{where}:{number}: status is {row['status']!r}: only runs in which all requests complete can be fitted"
            )
        columns.append(
            (
                fields.number("arrival_ms", least=0) / 1e3,
                fields.count("prompt_tokens"),
                fields.count("output_tokens"),
                fields.number("ttft_ms", least=0),
                fields.number("e2e_ms", least=0),
            )
        )
    return [of_requests(source, where, "understudy requests", "arrival_ms", columns)]
