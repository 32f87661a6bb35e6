"""One load through one engine, and its times as a client sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.run.offline import run_offline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.calibrate.load import Load
    from understudy.engines.config import VllmConfig

    Times = NDArray[np.float64]


class Outcome(msgspec.Struct, frozen=True):
    """Times of every request in milliseconds, in the order of the load; NaN where a request has none."""

    ttft_ms: Times
    tpot_ms: Times
    """Of requests with two tokens or more."""
    e2e_ms: Times
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]

    def mean(self, name: str) -> float:
        """Over the requests that have it; 0 where none does, as TPOT of answers of one token."""
        times = getattr(self, name)
        return float(np.nanmean(times)) if np.isfinite(times).any() else 0.0


def simulate(
    load: Load, engine: VllmConfig, *, front_end_ms: float = 0.0, workers: int = 1, ranks: bool = False
) -> Outcome:
    """Replay it. `front_end_ms` passes between client and engine: it is part of TTFT and of the whole request, and
    keeps a slot of a closed loop empty. `ranks` says that workers are ranks that step together.

    InvalidArgument says which request can never be served, and why.
    """
    run = run_offline(
        load.workload,
        engine,
        workers=workers,
        routing="round_robin" if workers == 1 else "least_loaded",
        load=load.loop(front_end_ms),
        ranks=ranks,
    )
    columns = run.timeline
    if columns.reject_reasons:
        row, reason = next(iter(columns.reject_reasons.items()))
        raise InvalidArgument(f"request {row} of the load: {reason}")
    ttft = (columns.first_token_ns - columns.arrival_ns) / 1e6 + front_end_ms
    e2e = (columns.last_token_ns - columns.arrival_ns) / 1e6 + front_end_ms
    gaps = columns.output_tokens - 1
    tpot = np.where(gaps > 0, (e2e - ttft) / np.maximum(gaps, 1), np.nan)
    return Outcome(ttft, tpot, e2e, columns.prompt_tokens, columns.output_tokens)
