"""Verdicts on plays of agents: what their critical paths consist of, and in what state their sessions return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.plays import measure_plays
from understudy.report.sleeping import measure_sleep
from understudy.report.verdict import Verdict
from understudy.text import quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData

MOST_GAP = 0.8
"""Share of the critical paths from which tools, and not the fleet, decide how long plays take."""
MOST_LOST = 0.1
"""Share of the tokens of returning sessions from which computing them again is a problem."""
LEAST_RETURNS = 20


def tools_dominate(report: ReportData) -> Verdict | None:
    """Report that plays consist of waiting for tools, so that a faster fleet shortens them little."""
    workload = report.workload
    if workload is None or workload.graph is None:
        return None
    plays = measure_plays(workload, report.columns)
    shares = plays.shares()
    outside = shares["gap"] + shares["waiting"]
    if not (plays.makespan_ns >= 0).any() or outside < MOST_GAP:
        return None
    return Verdict(
        "tools_dominate",
        f"Plays wait for their tools: {quantity(outside, 'ratio')} of the critical paths lie between an answer and the "
        f"next request; a fleet without delay would shorten them by {quantity(1 - outside, 'ratio')}.",
        "Serve more plays at a time (--lanes) with this fleet, or use a smaller one.",
    )


def sessions_return_cold(report: ReportData) -> Verdict | None:
    """Report that sessions returned to KV that had been evicted, and was computed again."""
    workload = report.workload
    if workload is None or workload.graph is None or not report.kv.evictions:
        return None
    sleep = measure_sleep(workload, report.columns)
    lost = sleep.shares()["computed again"]
    if len(sleep) < LEAST_RETURNS or lost < MOST_LOST:
        return None
    peak = int(sleep.sleeping_tokens.max(initial=0))
    return Verdict(
        "sessions_return_cold",
        f"Sessions return to evicted KV: {quantity(lost, 'ratio')} of the tokens that they had before were computed "
        f"again. Sleeping sessions had up to {peak:,} tokens of KV; the devices hold {sleep.capacity_tokens:,}.",
        "Keep sessions on one worker (--routing session_tree), and their KV on a tier (--g2-bytes) or held "
        "(--session-kv hold_s=S).",
    )
