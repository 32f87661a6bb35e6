"""Describe what to change if no fleet of the space meets the goal: the space, or the goal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.engines.kinds.registry import kind_of
from understudy.sweep.space import SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.sweep.result import Sweep
    from understudy.sweep.trials import Trial

_FLAGS = {"ttft_ms": "--slo-ttft-ms", "itl_ms": "--slo-itl-ms", "e2e_ms": "--slo-e2e-ms"}


def describe_remedies(sweep: Sweep, nearest: Trial) -> Iterator[str]:
    """Yield which flag makes the space larger, and which goal the nearest fleet meets."""
    if nearest.summary.rejected:
        memory = kind_of(nearest.candidate.settings.engine).terms.memory
        yield (
            f"{nearest.summary.rejected:,} requests fit no worker, and more workers do not help them: give each more "
            f"memory ({memory}) or a longer --max-model-len, or leave these requests out"
        )
    gpus = "more GPUs per worker (--tensor-parallel-size) or a faster GPU (--gpu) shorten each step"
    yield f"widen the space: {_widen(sweep, nearest)}; {gpus}"
    share, limits = math.floor(nearest.judged * 1e4) / 1e4, _find_limits(sweep, nearest)
    met = [f"--goal {share:g}, which the nearest fleet meets"] if share > 0 else []
    near = [f"limits near its p99 ({' '.join(limits)})"] if limits else []
    if met or near:
        yield f"or relax the goal: {'; or '.join(met + near)}"


def _widen(sweep: Sweep, nearest: Trial) -> str:
    most = max(trial.gpus for trial in sweep.trials)
    if SPLIT in nearest.flags or nearest.candidate.settings.disaggregation is not None:
        return f"more prefill and decode workers, such as --splits {2 * most}"
    if nearest.candidate.settings.pools:
        return "more workers in a pool (workers of pools, in --config)"
    counts = [value for trial in sweep.trials if isinstance(value := trial.flags.get("workers"), int)]
    largest = max(counts, default=nearest.candidate.settings.workers)
    return f"more workers, such as --vary workers={largest}..{2 * largest}"


def _find_limits(sweep: Sweep, nearest: Trial) -> list[str]:
    """Return the flags of the missed objectives with the nearest fleet's p99, rounded up."""
    found = []
    for name in sweep.objectives:
        tail = getattr(nearest.summary, name).p99
        if nearest.summary.within[name] < sweep.goal and tail is not None:
            found.append(f"{_FLAGS[name]} {_round_up(tail):g}")
    return found


def _round_up(value: float) -> float:
    """Round up to three significant digits."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return round(math.ceil(value / unit) * unit, 12)
