"""Reader of guidellm's `benchmarks.json`: several benchmarks per file, with all successful requests."""

from __future__ import annotations

from typing import Any

import msgspec

from understudy.calibrate.benchmark import Benchmark, Fields, check_units
from understudy.calibrate.readers.single_requests import build_benchmark
from understudy.errors import InvalidArgument


def is_report(content: dict[str, Any]) -> bool:
    """Whether `content` has the keys of a report."""
    benchmarks = content.get("benchmarks")
    return isinstance(benchmarks, list) and all(
        isinstance(one, dict) and "requests" in one for one in benchmarks
    )


def read(source: tuple[str, str], where: str, content: dict[str, Any]) -> list[Benchmark]:
    """Read all benchmarks of the file. InvalidArgument if a benchmark has only a sample of its requests."""
    if not content["benchmarks"]:
        raise InvalidArgument(f"{where}: benchmarks is empty, so there is nothing to fit")
    return [
        _read_benchmark(source, f"{where}: benchmarks[{index}]", one)
        for index, one in enumerate(content["benchmarks"])
    ]


def _read_benchmark(source: tuple[str, str], where: str, content: dict[str, Any]) -> Benchmark:
    groups = content["requests"]
    if not isinstance(groups, dict):
        raise InvalidArgument(f"{where}.requests must have successful, errored and incomplete requests")
    if lost := len(groups.get("errored") or ()):
        raise InvalidArgument(
            f"{where}.requests.errored has {lost} requests, which put an unknown load on the engine; repeat the "
            "benchmark until all complete"
        )
    rows = groups.get("successful") or []
    if not rows:
        raise InvalidArgument(f"{where}.requests.successful is empty, so there is nothing to fit")
    total = _total(content)
    if total is not None and total > len(rows):
        raise InvalidArgument(
            f"{where}.requests.successful is a sample of {len(rows)} of {total}, from which the load cannot be "
            "replayed; run guidellm without a limit on saved requests"
        )
    read = [_read_request(f"{where}.requests.successful[{index}]", row) for index, row in enumerate(rows)]
    found = build_benchmark(source, where, "guidellm", "request_start_time", read)
    if not (cut := len(groups.get("incomplete") or ())):
        return found
    note = f"{cut} requests were incomplete when the benchmark ended; the replay omits their load"
    return msgspec.structs.replace(found, notes=(*found.notes, note))


def _read_request(where: str, row: object) -> tuple[float, float, float, float, float]:
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where} must be a JSON object")
    fields = Fields(where, row)
    timings = Fields(f"{where}.info.timings", _timings(row))
    start = (
        fields.number("request_start_time")
        if row.get("request_start_time") is not None
        else timings.number("request_start", remedy="without it the arrival is unknown")
    )
    ttft_ms = (
        fields.number("time_to_first_token_ms", least=0)
        if row.get("time_to_first_token_ms") is not None
        else (timings.number("first_token_iteration") - start) * 1e3
    )
    latency_s = (
        timings.number("last_token_iteration") - start
        if timings.content.get("last_token_iteration") is not None
        else fields.number("request_latency", least=0)
    )
    if timings.content.get("first_token_iteration") is not None:
        first_ms = (timings.number("first_token_iteration") - start) * 1e3
        check_units(where, "time_to_first_token_ms", ttft_ms, first_ms, "its timings give")
    return start, fields.count("prompt_tokens"), fields.count("output_tokens"), ttft_ms, latency_s * 1e3


def _timings(row: dict[str, Any]) -> dict[str, Any]:
    info = row.get("info") or row.get("scheduler_info")
    timings = info.get("timings") if isinstance(info, dict) else None
    return timings if isinstance(timings, dict) else {}


def _total(content: dict[str, Any]) -> int | None:
    metrics = content.get("metrics")
    totals = metrics.get("request_totals") if isinstance(metrics, dict) else content.get("request_totals")
    value = totals.get("successful") if isinstance(totals, dict) else None
    return value if isinstance(value, int) else None
