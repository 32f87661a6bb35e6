"""Where time goes: the phases of a request's latency, stacked."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from understudy.report.html.charts import FULL, Card
from understudy.report.html.plot import number
from understudy.report.phases import NAMES, Phases
from understudy.report.text import duration

if TYPE_CHECKING:
    from understudy.report.report import Report

STYLES = {"queue_ms": "s3", "room_ms": "s2", "parked_ms": "s4", "prefill_ms": "s1", "decode_ms": "base"}
LEFT, RIGHT, BAR, GAP, TOP = 150, 90, 34, 22, 10


def where_time_goes(report: Report, baseline: Report | None) -> Card | None:
    """The mean request and the slowest percent, each as one bar; below them those of the baseline."""
    bars = _bars(report, "")
    if not bars:
        return None
    if baseline is not None:
        bars += _bars(baseline, ", baseline")
    longest = max(sum(parts.values()) for _, parts in bars) or 1.0
    scale = (FULL.width - LEFT - RIGHT) / longest
    shapes = []
    for place, (label, parts) in enumerate(bars):
        y = TOP + place * (BAR + GAP)
        x = float(LEFT)
        shapes.append(
            f'<text class="tick name" x="{LEFT - 10}" y="{y + BAR / 2}" dy=".32em" text-anchor="end">'
            f"{escape(label)}</text>"
        )
        for name, value in parts.items():
            width = value * scale
            if width > 0:
                shapes.append(
                    f'<path class="area solid {STYLES[name]}" data-tip="{NAMES[name]} {duration(value / 1e3)}" '
                    f'd="M{number(x)} {y}h{number(width)}v{BAR}h{number(-width)}z"/>'
                )
            x += width
        total = duration(sum(parts.values()) / 1e3)
        shapes.append(f'<text class="tick" x="{number(x + 8)}" y="{y + BAR / 2}" dy=".32em">{total}</text>')
    height = TOP + len(bars) * (BAR + GAP)
    shown = [name for name in NAMES if any(parts[name] > 0 for _, parts in bars)]
    return Card(
        "Where time goes",
        "arrival to last token, by phase: the mean request, and the slowest percent",
        f'<div class="plot"><svg viewBox="0 0 {FULL.width} {height}" role="img" aria-label="Latency by phase">'
        f"{''.join(shapes)}</svg></div>",
        tuple((STYLES[name], NAMES[name]) for name in shown),
        "full",
    )


def _bars(report: Report, suffix: str) -> list[tuple[str, dict[str, float]]]:
    phases = Phases.of(report)
    if not len(phases.queue_ms):
        return []
    return [(f"mean{suffix}", phases.means()), (f"slowest 1 %{suffix}", phases.means(phases.slowest()))]
