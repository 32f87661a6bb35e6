"""guidellm's `benchmarks.json`: several benchmarks a file, with every request that succeeded."""

from __future__ import annotations

from typing import Any

import msgspec

from understudy.calibrate.benchmark import Benchmark, Fields, check_units
from understudy.calibrate.readers.single_requests import of_requests
from understudy.errors import InvalidArgument


def is_report(content: dict[str, Any]) -> bool:
    """Whether these are its keys."""
    benchmarks = content.get("benchmarks")
    return isinstance(benchmarks, list) and all(
        isinstance(one, dict) and "requests" in one for one in benchmarks
    )


def read(source: tuple[str, str], where: str, content: dict[str, Any]) -> list[Benchmark]:
    """Each benchmark of the file. Its requests must be all of them, not a sample."""
    if not content["benchmarks"]:
        raise InvalidArgument(f"{where}: benchmarks is empty: nothing to fit")
    return [
        _read(source, f"{where}: benchmarks[{index}]", one) for index, one in enumerate(content["benchmarks"])
    ]


def _read(source: tuple[str, str], where: str, content: dict[str, Any]) -> Benchmark:
    groups = content["requests"]
    if not isinstance(groups, dict):
        raise InvalidArgument(f"{where}.requests must have successful, errored and incomplete requests")
    if lost := len(groups.get("errored") or ()):
        raise InvalidArgument(
            f"{where}.requests.errored has {lost} requests: they loaded the engine, and nobody knows how much; repeat "
            "the benchmark until all complete"
        )
    rows = groups.get("successful") or []
    if not rows:
        raise InvalidArgument(f"{where}.requests.successful is empty: nothing to fit")
    total = _total(content)
    if total is not None and total > len(rows):
        raise InvalidArgument(
            f"{where}.requests.successful is a sample of {len(rows)} of {total}: the load cannot be replayed from it; "
            "run guidellm without a limit on saved requests"
        )
    read = [_request(f"{where}.requests.successful[{index}]", row) for index, row in enumerate(rows)]
    found = of_requests(source, where, "guidellm", "request_start_time", read)
    if not (cut := len(groups.get("incomplete") or ())):
        return found
    note = f"{cut} requests were cut off when the benchmark ended; the last ones had a busier engine than is replayed"
    return msgspec.structs.replace(found, notes=(*found.notes, note))


def _request(where: str, row: object) -> tuple[float, float, float, float, float]:
    if not isinstance(row, dict):
        raise InvalidArgument(f"{where} must have keys and values")
    fields = Fields(where, row)
    timings = Fields(f"{where}.info.timings", _timings(row))
    start = (
        fields.number("request_start_time")
        if row.get("request_start_time") is not None
        else timings.number("request_start", remedy="without it nobody can tell when the request came")
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
        check_units(where, "time_to_first_token_ms", ttft_ms, first_ms, "its timings say")
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
