"""Build the line on top of the page that says whether the goal was met."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from understudy.defaults import GOAL
from understudy.report.html.scale import latency_label
from understudy.text import quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData

_NAMES = {"ttft_ms": ("TTFT", "ttft_ms"), "itl_ms": ("TPOT", "tpot_ms"), "e2e_ms": ("E2E", "e2e_ms")}
"""Objectives, with the statistics whose p99 is compared with each limit."""


def goal_line(report: ReportData) -> str:
    """Return whether enough requests met the objectives, and each p99 beside its limit; empty without objectives."""
    goodput = report.goodput
    if goodput is None:
        return ""
    is_met = goodput.ratio >= GOAL
    items = []
    for name, (label, key) in _NAMES.items():
        limit = getattr(goodput.slo, name)
        if limit is None:
            continue
        p99 = getattr(report, key).p99
        state = "" if p99 != p99 else " ok" if p99 <= limit else " late"
        value = "no value" if p99 != p99 else latency_label(p99)
        items.append(
            f'<span class="limit{state}">{label} p99 <b>{escape(value)}</b> of {escape(latency_label(limit))}</span>'
        )
    verdict = "Goal met" if is_met else "Goal missed"
    # A goal that is missed does not round up to what is wanted.
    ratio = goodput.ratio if is_met else min(goodput.ratio, math.floor(goodput.ratio * 1000) / 1000)
    share = quantity(ratio, "ratio")
    return (
        f'<section class="goal {"met" if is_met else "missed"}"><b class="said">{verdict}</b>'
        f"<span>{share} of requests in time, {100 * GOAL:g} % wanted</span>{''.join(items)}</section>"
    )
