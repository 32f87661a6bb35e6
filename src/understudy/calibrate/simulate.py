"""Simulate a load on an engine, with times as measured at the client."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.calibrate.load import Load
    from understudy.engines.engine_config import EngineConfig

    Times = NDArray[np.float64]


class Outcome(msgspec.Struct, frozen=True):
    """Times of each request in milliseconds, in the order of the load; NaN without a value."""

    ttft_ms: Times
    tpot_ms: Times
    """TPOT of requests with at least two tokens."""
    e2e_ms: Times
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    seconds: float
    """From the first arrival to the last token."""

    def mean(self, name: str) -> float:
        """Return the mean over the requests that have a value; NaN if none has, as TPOT of one-token answers."""
        return mean_of_known(getattr(self, name))


def mean_of_known(times: Times) -> float:
    """Return the mean of the values that are not NaN; NaN if all are."""
    known = times[~np.isnan(times)]
    return float(known.mean()) if len(known) else math.nan


def simulate(
    load: Load, engine: EngineConfig, *, front_end_ms: float = 0.0, workers: int = 1, ranks: bool = False
) -> Outcome:
    """Replay the load and return the times at the client.

    `front_end_ms` is the time between client and engine: part of TTFT and E2E, and of the turnaround of a closed
    loop's slot. `workers` are data-parallel ranks, among which the engine's front end chooses, as in a replay; `ranks`
    means that they step together. InvalidArgument names a request that can never be served.
    """
    run = run_offline(
        RunPlan(
            load.workload,
            msgspec.structs.replace(engine, data_parallel_size=workers),
            load=load.loop(front_end_ms),
            ranks=ranks,
        )
    )
    columns = run.timeline
    if columns.reject_reasons:
        row, reason = next(iter(columns.reject_reasons.items()))
        raise InvalidArgument(f"request {row} of the load: {reason}")
    ttft = (columns.first_token_ns - columns.arrival_ns) / 1e6 + front_end_ms
    e2e = (columns.last_token_ns - columns.arrival_ns) / 1e6 + front_end_ms
    gaps = columns.output_tokens - 1
    tpot = np.where(gaps > 0, (e2e - ttft) / np.maximum(gaps, 1), np.nan)
    span_ns = columns.last_token_ns.max() - columns.arrival_ns.min()
    seconds = max(float(span_ns) / 1e9 + front_end_ms / 1e3, 1e-9)
    return Outcome(ttft, tpot, e2e, columns.prompt_tokens, columns.output_tokens, seconds)
