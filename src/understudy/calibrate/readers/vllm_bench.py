"""Reader of results of `vllm bench serve --save-result`, plain or with `--save-detailed`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from understudy.calibrate.benchmark import (
    DRAWS,
    Benchmark,
    Fields,
    Times,
    check_clock,
    check_times,
    check_units,
)
from understudy.calibrate.load import Load, build_load
from understudy.defaults import LEAST_LENGTH
from understudy.errors import InvalidArgument

_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "num_gpu_blocks")
_LISTS = ("input_lens", "output_lens", "ttfts", "itls")
"""Lists that --save-detailed adds, one entry per request."""
_SEED = 0


def is_result(content: dict[str, Any]) -> bool:
    """Whether `content` has the keys of a result."""
    return any(name in content for name in ("total_input_tokens", "input_lens", "ttfts"))


def read(
    source: tuple[str, str], where: str, content: dict[str, Any], least_length: float | None
) -> list[Benchmark]:
    """Read one result. InvalidArgument for failed requests, or missing lengths or arrivals."""
    fields = Fields(where, content)
    failed = content.get("failed") or 0
    errors = [text for text in content.get("errors") or () if text]
    if failed or errors:
        raise InvalidArgument(
            f"{where}: failed={failed or len(errors)}: failed requests put an unknown load on the engine; repeat the "
            "benchmark until all complete"
        )
    engine = {name: int(float(content[name])) for name in _ENGINE if _is_count(content.get(name))}
    if content.get("input_lens") is None and content.get("ttfts") is None:
        return [_read_summary(source, fields, engine, least_length)]
    if missing := [name for name in _LISTS if content.get(name) is None]:
        present = next(name for name in _LISTS if name not in missing)
        raise InvalidArgument(
            f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, but {present} are present: "
            "a fit needs lengths and times; save the result with --save-detailed"
        )
    return [_read_detailed(source, fields, engine)]


def _read_detailed(source: tuple[str, str], fields: Fields, engine: dict[str, int]) -> Benchmark:
    inputs = fields.numbers("input_lens", None, least=1)
    rows = len(inputs)
    outputs = fields.numbers("output_lens", rows, least=1)
    ttft_ms = fields.numbers("ttfts", rows, least=0) * 1e3
    gaps = fields.need("itls")
    if not isinstance(gaps, list) or len(gaps) != rows or not all(isinstance(gap, list) for gap in gaps):
        raise InvalidArgument(f"{fields.where}: itls must have a list for each of {rows} requests")
    spans = 1e3 * np.array(
        [
            sum(fields.as_number(f"itls[{row}][{at}]", value, 0) for at, value in enumerate(gap))
            for row, gap in enumerate(gaps)
        ]
    )
    e2e_ms = ttft_ms + spans
    check_times(fields.where, ttft_ms, e2e_ms)
    completed = fields.content.get("completed")
    if isinstance(completed, int) and completed != rows:
        raise InvalidArgument(
            f"{fields.where}: completed={completed}, but input_lens has {rows} entries; the file is truncated or mixed"
        )
    if (ttft_ms > 3_600_000).any():
        raise InvalidArgument(f"{fields.where}: ttfts exceed an hour; they must be seconds, not ms")
    concurrency = fields.content.get("max_concurrency")
    if fields.content.get("start_times") is not None:
        starts = fields.numbers("start_times", rows)
        check_clock(fields.where, "start_times", starts)
        load = build_load(inputs, outputs, arrival_s=starts - starts.min())
    elif _is_count(concurrency) and fields.content.get("request_rate") in ("inf", math.inf, None):
        load = build_load(inputs, outputs, concurrency=int(float(str(concurrency))))
    else:
        raise InvalidArgument(
            f"{fields.where}: start_times are missing, and without max_concurrency arrivals are unknown; save the "
            "result with a newer vLLM, or run with --max-concurrency"
        )
    tpot: Times = np.where(outputs > 1, spans / np.maximum(outputs - 1, 1), np.nan)
    means = _compute_means(ttft_ms, tpot, e2e_ms)
    _check_units(fields, means)
    return Benchmark(
        file=source[0],
        sha256=source[1],
        format="vllm bench serve, detailed",
        load=load,
        means=means,
        ttft_ms=ttft_ms,
        tpot_ms=tpot,
        e2e_ms=e2e_ms,
        engine=engine,
    )


def _check_units(fields: Fields, means: dict[str, float]) -> None:
    """Check that the lists (in seconds) agree with the means (in milliseconds)."""
    for key, name in (("mean_ttft_ms", "ttft_ms"), ("mean_tpot_ms", "tpot_ms")):
        mean, found = fields.content.get(key), means.get(name, 0.0)
        if isinstance(mean, int | float):
            check_units(fields.where, key, float(mean), found, "its list has a mean of")


def _read_summary(
    source: tuple[str, str], fields: Fields, engine: dict[str, int], least_length: float | None
) -> Benchmark:
    completed = fields.count("completed", remedy="no request completed, so there is nothing to fit")
    mean_input = fields.count("total_input_tokens") / completed
    mean_output = fields.count("total_output_tokens") / completed
    least = least_length
    notes: tuple[str, ...] = ()
    if least is None:
        ratio = fields.content.get("random_range_ratio")
        least = float(ratio) if isinstance(ratio, int | float | str) and _is_share(ratio) else 1.0
        if ratio is None:
            least = LEAST_LENGTH
            notes = (
                f"lengths are taken as random, from {least:g} of the longest on (--least-length 1: all equal)",
            )
    draw = np.random.default_rng(_SEED)
    load, *others = (
        _sample_load(
            fields,
            _sample_lengths(draw, mean_input, least, completed),
            _sample_lengths(draw, mean_output, least, completed),
            draw,
        )
        for _ in range(DRAWS)
    )
    means = {
        "ttft_ms": fields.number("mean_ttft_ms", least=0),
        "tpot_ms": fields.number("mean_tpot_ms", least=0),
    }
    if fields.content.get("mean_e2el_ms") is not None:
        means["e2e_ms"] = fields.number("mean_e2el_ms", least=0)
    return Benchmark(
        file=source[0],
        sha256=source[1],
        format="vllm bench serve",
        load=load,
        other_draws=tuple(others),
        means=means,
        engine=engine,
        notes=notes,
    )


def _sample_lengths(draw: np.random.Generator, mean: float, least: float, rows: int) -> Times:
    """Sample lengths with this mean, uniform from `least` times the longest to the longest."""
    longest = mean * 2 / (1 + least)
    values: Times = np.maximum(np.round(draw.uniform(least * longest, longest, size=rows)), 1)
    return values


def _sample_load(fields: Fields, inputs: Times, outputs: Times, draw: np.random.Generator) -> Load:
    rate = fields.need("request_rate", "give a number, or inf with max_concurrency")
    concurrency = fields.content.get("max_concurrency")
    if rate in ("inf", math.inf):
        if not _is_count(concurrency):  # all at once
            return build_load(inputs, outputs, arrival_s=np.zeros(len(inputs)))
        return build_load(inputs, outputs, concurrency=int(float(str(concurrency))))
    rate_per_s = fields.as_number("request_rate", rate, 1e-9)
    if _is_count(concurrency) and int(float(str(concurrency))) < len(inputs):
        raise InvalidArgument(
            f"{fields.where}: request_rate={rate} with max_concurrency={concurrency}: a summary does not say which "
            "limited the requests; save the result with --save-detailed"
        )
    burstiness = fields.content.get("burstiness", 1.0)
    shape = fields.as_number("burstiness", burstiness, 1e-9)
    gaps = draw.gamma(shape, 1 / (rate_per_s * shape), size=len(inputs))
    return build_load(inputs, outputs, arrival_s=np.cumsum(gaps))


def _compute_means(ttft: Times, tpot: Times, e2e: Times) -> dict[str, float]:
    found = {"ttft_ms": float(np.mean(ttft)), "e2e_ms": float(np.mean(e2e))}
    if np.isfinite(tpot).any():
        found["tpot_ms"] = float(np.nanmean(tpot))
    return found


def _is_count(value: object) -> bool:
    try:
        return not isinstance(value, bool) and float(str(value)) >= 1
    except ValueError:
        return False


def _is_share(value: object) -> bool:
    try:
        return 0 < float(str(value)) <= 1
    except ValueError:
        return False
