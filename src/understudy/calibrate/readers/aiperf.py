"""Reader of AIPerf's exports: records (`profile_export.jsonl`) or a summary (`profile_export_aiperf.json`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from understudy.calibrate.benchmark import DRAWS, Benchmark, Fields, Times, check_units
from understudy.calibrate.load import build_load
from understudy.calibrate.readers.single_requests import build_benchmark
from understudy.errors import InvalidArgument

_TO_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "milliseconds": 1.0}


def is_record(row: dict[str, Any]) -> bool:
    """Whether `row` has the keys of a record."""
    return isinstance(row.get("metadata"), dict) and isinstance(row.get("metrics"), dict)


def is_summary(content: dict[str, Any]) -> bool:
    """Whether `content` has the keys of a summary."""
    return "input_config" in content and isinstance(content.get("time_to_first_token"), dict)


def read_records(source: tuple[str, str], where: str, rows: list[dict[str, Any]]) -> list[Benchmark]:
    """Read the requests of the profiling phase, by start."""
    kept = []
    for number, row in enumerate(rows, 1):
        if not is_record(row):
            raise InvalidArgument(f"{where}:{number}: metadata and metrics are missing; the file is mixed")
        if row["metadata"].get("benchmark_phase", "profiling") == "profiling":
            kept.append((number, row))
    if not kept:
        raise InvalidArgument(f"{where}: no record has benchmark_phase profiling, so there is nothing to fit")
    read = [_read_record(f"{where}:{number}", row) for number, row in kept]
    return [build_benchmark(source, where, "aiperf records", "metadata.request_start_ns", read)]


def _read_record(where: str, row: dict[str, Any]) -> tuple[float, float, float, float, float]:
    metadata, metrics = (
        Fields(f"{where}: metadata", row["metadata"]),
        Fields(f"{where}: metrics", row["metrics"]),
    )
    if row["metadata"].get("was_cancelled") or row.get("error"):
        raise InvalidArgument(
            f"{where}: the request was cancelled or failed, and put an unknown load on the engine; repeat the "
            "benchmark until all complete"
        )
    start, end = metadata.number("request_start_ns"), metadata.number("request_end_ns")
    if end < start:
        raise InvalidArgument(
            f"{where}: request_end_ns is before request_start_ns: the clock ran backwards; export again"
        )
    latency = duration = (end - start) / 1e6
    if metrics.content.get("request_latency"):
        latency = _read_milliseconds(metrics, "request_latency")
        check_units(
            where, "metrics.request_latency", latency, duration, "request_end_ns − request_start_ns is"
        )
    return (
        start / 1e9,
        _read_count(metrics, "input_sequence_length"),
        _read_count(metrics, "output_sequence_length"),
        _read_milliseconds(metrics, "time_to_first_token"),
        latency,
    )


def read_summary(source: tuple[str, str], where: str, content: dict[str, Any]) -> list[Benchmark]:
    """Read the means of a closed loop; the concurrency and both lengths are required."""
    fields = Fields(where, content)
    config = content.get("input_config")
    concurrency = _find(config, "concurrency")
    if not isinstance(concurrency, int) or isinstance(concurrency, bool) or concurrency < 1:
        raise InvalidArgument(
            f"{where}: input_config has no concurrency, so arrivals are unknown; give profile_export.jsonl, which "
            "has them"
        )
    rows = int(_average(fields, "request_count")[0])
    inputs, outputs = (_average(fields, f"{side}_sequence_length") for side in ("input", "output"))
    draw = np.random.default_rng(0)
    load, *others = (
        build_load(
            _sample_lengths(draw, *inputs, rows),
            _sample_lengths(draw, *outputs, rows),
            concurrency=concurrency,
        )
        for _ in range(DRAWS)
    )
    means = {
        "ttft_ms": _block_ms(fields, "time_to_first_token"),
        "tpot_ms": _block_ms(fields, "inter_token_latency"),
    }
    if content.get("request_latency") is not None:
        means["e2e_ms"] = _block_ms(fields, "request_latency")
    return [
        Benchmark(
            file=source[0],
            sha256=source[1],
            format="aiperf summary",
            load=load,
            other_draws=tuple(others),
            means=means,
        )
    ]


def _sample_lengths(draw: np.random.Generator, mean: float, deviation: float, rows: int) -> Times:
    lengths: Times = np.maximum(np.round(draw.normal(mean, deviation, size=rows)), 1)
    return lengths


def _average(fields: Fields, key: str) -> tuple[float, float]:
    block = Fields(f"{fields.where}: {key}", _block(fields, key))
    deviation = block.content.get("std")
    return block.number("avg", least=1), 0.0 if deviation is None else block.number("std", least=0)


def _block_ms(fields: Fields, key: str) -> float:
    block = Fields(f"{fields.where}: {key}", _block(fields, key))
    return block.number("avg", least=0) * _unit(block)


def _block(fields: Fields, key: str) -> dict[str, object]:
    block = fields.need(key)
    if not isinstance(block, dict):
        raise InvalidArgument(f"{fields.where}: {key} must have unit and avg, got {block!r}")
    return block


def _read_milliseconds(metrics: Fields, key: str) -> float:
    block = Fields(f"{metrics.where}.{key}", _block(metrics, key))
    return block.number("value", least=0) * _unit(block)


def _read_count(metrics: Fields, key: str) -> float:
    block = metrics.need(key)
    if isinstance(block, dict):
        return Fields(f"{metrics.where}.{key}", block).number("value", least=1)
    return metrics.number(key, least=1)


def _unit(block: Fields) -> float:
    unit = str(block.need("unit")).lower()
    if unit not in _TO_MS:
        raise InvalidArgument(f"{block.where}: unit {unit!r} is not known; known are {', '.join(_TO_MS)}")
    return _TO_MS[unit]


def _find(config: object, name: str) -> object:
    """Find a key at any depth."""
    if isinstance(config, dict):
        if name in config:
            return config[name]
        for value in config.values():
            if (found := _find(value, name)) is not None:
                return found
    return None
