"""Advice of `understudy replay` on prefill and decode workers: other splits of the same workers, replayed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs

from understudy.report.advice import Advice, Trial
from understudy.report.verdict import Verdict
from understudy.report.verdicts import find_verdicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report import Report
    from understudy.run.disaggregation import Disaggregation

LIMIT_S = 10.0
GAIN = 0.05
"""A split is recommended if it improves the measure by this share."""


def try_splits(
    report: Report, given: Disaggregation, replay_with: Callable[[Disaggregation], Report]
) -> Advice | None:
    """Replay the neighbouring splits of the same number of workers; None if there are none."""
    prefill, decode = given.prefill_workers, given.decode_workers
    if prefill is None or decode is None:
        return None
    splits = [(prefill + 1, decode - 1), (prefill - 1, decode + 1)]
    splits = [split for split in splits if min(split) >= 1]
    started = time.monotonic()
    trials: list[Trial] = []
    for one, other in splits:
        if trials and time.monotonic() - started > LIMIT_S:
            break
        tried = replay_with(structs.replace(given, prefill_workers=one, decode_workers=other))
        measure, before, after, helps = _compare(report, tried)
        trials.append(
            Trial(f"--prefill-workers {one} --decode-workers {other}", measure, before, after, helps)
        )
    seconds = time.monotonic() - started
    verdicts = [verdict for verdict in find_verdicts(report) if verdict.rule != "handoff_bottleneck"]
    found = [verdict for verdict in find_verdicts(report) if verdict.rule == "handoff_bottleneck"]
    if (best := next((trial for trial in trials if trial.helps), None)) is not None:
        finding = found[0].finding if found else "Another split of the same workers is faster."
        effect = f"`{best.change}`: {best.measure} {best.before:,.1f} → {best.after:,.1f} (replayed)."
        verdicts.insert(0, Verdict("handoff_split", finding, effect))
    elif found:
        verdicts.insert(0, found[0])
    return Advice(tuple(verdicts), tuple(trials), seconds, LIMIT_S, len(splits) - len(trials))


def _compare(report: Report, other: Report) -> tuple[str, float, float, bool]:
    """Return the measure, both values, and whether the second is better: attainment if there are goals, else E2E."""
    if report.goodput is not None and other.goodput is not None:
        before, after = report.goodput.ratio * 100, other.goodput.ratio * 100
        return "attainment %", before, after, after > before + 100 * GAIN / 5
    before, after = report.e2e_ms.mean, other.e2e_ms.mean
    return "mean E2E ms", before, after, after < before * (1 - GAIN)
