"""Bounds that rule out shapes without a replay: a request alone on an engine is the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from understudy._core import StepLoad

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.sweep.candidate import Candidate
    from understudy.workload import Workload

_POINTS = 64
"""Lengths of context at which step times are computed; a request has that of the next shorter one."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNK = 2048
SPARE = 0.7
"""Busy share of engines at which an estimate stops adding more."""


def bound_share(workload: Workload, candidate: Candidate) -> float:
    """Return an upper bound of the share of requests in time, whatever the number of engines.

    A request's tokens are at least one step apart, and a step with one sequence of its shortest context is the
    shortest. Ranks that step together and speculation have no such bound (1).
    """
    limit = candidate.slo.itl_ms
    engine = candidate.settings.engine
    if limit is None or engine.data_parallel_size > 1 or getattr(engine, "speculation", None) is not None:
        return 1.0
    if not hasattr(engine.timing, "coefficients"):  # measured steps need not grow with the context
        return 1.0
    timing = engine.timing.build()
    prompts = workload.prompt_tokens
    lengths = np.unique(np.quantile(prompts, np.linspace(0, 1, _POINTS), method="lower")).astype(np.int64)
    steps = np.array(
        [
            timing.step_ms(StepLoad(decodes=1, context_tokens=int(length), longest_context=int(length)))
            for length in lengths
        ]
    )
    fastest = np.minimum.accumulate(steps[::-1])[::-1][np.searchsorted(lengths, prompts, side="right") - 1]
    return float(((workload.cut_output_tokens <= 1) | (fastest <= limit)).mean())


class Work(NamedTuple):
    """Estimated time of one engine for the whole log, and the engines that the log keeps busy."""

    prefill_s: float
    decode_s: float
    engines: float

    @property
    def prefill_share(self) -> float:
        """Share of the time that prefill takes."""
        return self.prefill_s / max(self.prefill_s + self.decode_s, 1e-9)


def estimate_work(workload: Workload, candidate: Candidate, hit_ratio: float) -> Work:
    """Estimate the work of a log on engines of a candidate; it orders shapes, and rules none out."""
    engine, slo = candidate.settings.engine, candidate.slo
    timing = engine.timing.build()
    mean = int(workload.prompt_tokens.mean()) + int(workload.output_tokens.mean()) // 2
    prefill_ms = timing.step_ms(StepLoad(chunks=[(_CHUNK, 0)])) / _CHUNK
    limit = slo.itl_ms if slo.itl_ms is not None else np.inf
    decode_ms = np.inf
    for batch in _BATCHES:
        if batch > _most_sequences(engine):
            break
        step = timing.step_ms(StepLoad(decodes=batch, context_tokens=batch * mean, longest_context=mean))
        if batch > 1 and step > limit:
            break
        decode_ms = min(decode_ms, step / batch)
    prefill_s = workload.total_prompt_tokens * (1 - hit_ratio) * prefill_ms / 1e3
    decode_s = workload.total_output_tokens * decode_ms / 1e3
    spans = max(_span_s(workload), 1.0)
    engines = (prefill_s + decode_s) / spans / SPARE / engine.data_parallel_size
    return Work(prefill_s, decode_s, float(engines))


def _most_sequences(engine: EngineConfig) -> int:
    return int(getattr(engine, "max_num_seqs", None) or _BATCHES[-1])


def _span_s(workload: Workload) -> float:
    arrivals = workload.arrival_ns[workload.arrival_ns >= 0]
    return float(np.ptp(arrivals)) / 1e9 if len(arrivals) else 0.0
