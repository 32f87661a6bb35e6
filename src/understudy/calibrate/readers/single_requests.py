"""Build a benchmark from the measured times of single requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.calibrate.benchmark import Benchmark, Times, check_clock, check_times
from understudy.calibrate.load import build_load

if TYPE_CHECKING:
    from collections.abc import Sequence


def build_benchmark(
    source: tuple[str, str],
    where: str,
    kind: str,
    clock_key: str,
    read: Sequence[tuple[float, float, float, float, float]],
) -> Benchmark:
    """Build a benchmark from rows of start (s), input and output tokens, TTFT and E2E (ms), by start.

    Errors: InvalidArgument names an impossible `clock_key` or latency.
    """
    columns = [np.array(column) for column in zip(*read, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    start_s, inputs, outputs, ttft_ms, e2e_ms = (column[order] for column in columns)
    check_clock(where, clock_key, start_s)
    check_times(where, ttft_ms, e2e_ms)
    tpot: Times = np.where(outputs > 1, (e2e_ms - ttft_ms) / np.maximum(outputs - 1, 1), np.nan)
    means = {"ttft_ms": float(ttft_ms.mean()), "e2e_ms": float(e2e_ms.mean())}
    if np.isfinite(tpot).any():
        means["tpot_ms"] = float(np.nanmean(tpot))
    return Benchmark(
        file=source[0],
        sha256=source[1],
        format=kind,
        load=build_load(inputs, outputs, arrival_s=start_s - start_s.min()),
        means=means,
        ttft_ms=ttft_ms,
        tpot_ms=tpot,
        e2e_ms=e2e_ms,
    )
