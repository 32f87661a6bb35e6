"""Readers of benchmark files, one module per format; `read_benchmarks` detects the format from the keys."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from understudy.calibrate.readers import aiperf, guidellm, own_report, summary_table, vllm_bench
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.calibrate.benchmark import Benchmark

FORMATS = (
    "vllm bench serve --save-result (and --save-detailed)",
    "aiperf's profile_export.jsonl and profile_export_aiperf.json",
    "guidellm's benchmarks.json",
    "a CSV of summaries (isl, osl, conc, mean_ttft_ms, mean_tpot_ms)",
    "understudy replay --requests-jsonl",
)

TAKE_LEAST_LENGTH = ("vllm bench serve", "CSV of summaries")
"""Formats (of a `Benchmark`) that lack the range of random lengths."""


def read_benchmarks(
    path: Path, *, least_length: float | None = None, data_parallel_size: int = 1
) -> list[Benchmark]:
    """Read all benchmarks in a file.

    `least_length` is the shortest random length as a share of the nominal one, for summaries that lack it;
    `data_parallel_size` is the number of workers of one deployment, for lines that name their worker. InvalidArgument
    names the file, the key and the remedy for unknown formats, truncated files, and files without lengths or arrivals.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    if not text.strip():
        raise InvalidArgument(f"{path} is empty")
    source = (path.name, hashlib.sha256(raw).hexdigest())
    if path.suffix == ".csv":
        return summary_table.read(source, str(path), text, least_length)
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if len(lines) > 1 and lines[0].lstrip().startswith("{") and lines[0].rstrip().endswith("}"):
            return _read_lines(source, str(path), lines, data_parallel_size)
        raise InvalidArgument(
            f"{path} is not JSON: {error}; it may be truncated: save the benchmark again"
        ) from error
    if isinstance(content, dict) and _is_line(content):
        return _read_lines(source, str(path), lines, data_parallel_size)
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path}: must be a JSON object at the top level")
    return _read_object(source, str(path), content, least_length)


def _is_line(content: dict[str, Any]) -> bool:
    return ("metadata" in content and "metrics" in content) or {"arrival_ms", "ttft_ms"} <= content.keys()


def _read_lines(
    source: tuple[str, str], where: str, lines: list[str], data_parallel_size: int
) -> list[Benchmark]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(
                f"{where}:{number} is not JSON: {error}; the file is truncated: export it again"
            ) from error
        if not isinstance(row, dict):
            raise InvalidArgument(f"{where}:{number}: must be a JSON object")
        rows.append(row)
    if aiperf.is_record(rows[0]):
        return aiperf.read_records(source, where, rows)
    if own_report.is_request(rows[0]):
        return own_report.read_requests(source, where, rows, data_parallel_size)
    raise _unknown_format(where, rows[0])


def _read_object(
    source: tuple[str, str], where: str, content: dict[str, Any], least_length: float | None
) -> list[Benchmark]:
    if vllm_bench.is_result(content):
        return vllm_bench.read(source, where, content, least_length)
    if guidellm.is_report(content):
        return guidellm.read(source, where, content)
    if aiperf.is_summary(content):
        return aiperf.read_summary(source, where, content)
    if own_report.is_report(content):
        raise InvalidArgument(
            f"{where} is a report of understudy, which has no arrivals; give a file of --requests-jsonl instead"
        )
    raise _unknown_format(where, content)


def _unknown_format(where: str, content: dict[str, Any]) -> InvalidArgument:
    keys = ", ".join(list(content)[:8]) or "none"
    return InvalidArgument(
        f"{where} is not a known benchmark format (its keys: {keys}); known are {'; '.join(FORMATS)}"
    )
