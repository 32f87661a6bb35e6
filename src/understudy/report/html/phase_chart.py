"""Plot the phases of request latency, stacked."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.html.charts import FULL, Card, middles, time_axis, window_labels
from understudy.report.html.plot import HoverSeries, Plot, number
from understudy.report.html.scale import latency_label, latency_scale
from understudy.report.latency import NS_PER_S
from understudy.report.phases import NAMES, Phases
from understudy.report.series import window_of, windows
from understudy.text import duration

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.report.data import ReportData

STYLES = {"queue_ms": "s3", "room_ms": "s2", "parked_ms": "s4", "prefill_ms": "s1", "decode_ms": "base"}
LEFT, RIGHT, BAR, GAP, TOP = 150, 90, 34, 22, 10
MIN_REQUESTS, MAX_WINDOWS = 40, 60


def latency_by_phase(report: ReportData, baseline: ReportData | None) -> Card | None:
    """Plot one bar for the mean request and one for the slowest percent, also of the baseline."""
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
        "Latency by phase",
        "arrival to last token, by phase: the mean request, and the slowest percent",
        f'<div class="plot"><svg viewBox="0 0 {FULL.width} {height}" role="img" aria-label="Latency by phase">'
        f"{''.join(shapes)}</svg></div>",
        tuple((f"{STYLES[name]} solid", NAMES[name]) for name in shown),
        "full",
    )


def phases_over_time(report: ReportData, baseline: ReportData | None = None) -> Card | None:
    """Plot the mean of each phase by arrival, stacked, and the baseline's total."""
    phases = Phases.of(report)
    if len(phases.queue_ms) < MIN_REQUESTS:
        return None
    count = min(MAX_WINDOWS, max(8, len(phases.queue_ms) // 40))
    edges = windows(report.columns, count)
    means = _means(report, phases, edges)
    shown = [name for name in NAMES if np.nansum(means[name]) > 0]
    if not shown:
        return None
    stacked = np.cumsum([means[name] for name in shown], axis=0)
    x, seconds = time_axis(report, FULL)
    before = None
    if baseline is not None and len(Phases.of(baseline).queue_ms):
        before = np.sum(list(_means(baseline, Phases.of(baseline), edges).values()), axis=0)
    drawn = stacked[-1] if before is None else np.concatenate([stacked[-1], before])
    y = latency_scale(drawn[~np.isnan(drawn)], FULL.y, log=False)
    plot = Plot(FULL, x, y, "Phases of latency by arrival time")
    xs = middles(report, edges) / seconds
    low = np.where(np.isnan(stacked[0]), np.nan, 0.0)
    for name, high in zip(shown, stacked, strict=True):
        plot.area(xs, low, high, f"{STYLES[name]} solid")
        low = high
    series = [
        HoverSeries(
            NAMES[name],
            f"{STYLES[name]} solid",
            ["" if value != value else latency_label(value) for value in means[name].tolist()],
        )
        for name in reversed(shown)
    ]
    legend = [(f"{STYLES[name]} solid", NAMES[name]) for name in shown]
    if before is not None:
        plot.line(xs, before, "base ink")
        labels = ["" if value != value else latency_label(value) for value in before.tolist()]
        series.append(HoverSeries("total, baseline", "base ink", labels))
        legend.append(("base ink", "total, baseline"))
    plot.on_hover(xs, window_labels(report, edges), series)
    width = duration((edges[1] - edges[0]) / NS_PER_S)
    return Card(
        "Latency by phase, over time",
        f"mean of each phase, by arrival in windows of {width}",
        plot.svg(),
        tuple(legend),
        "full",
    )


def _means(report: ReportData, phases: Phases, edges: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return the mean of each phase per window of arrivals; NaN for windows without arrivals."""
    count = len(edges) - 1
    window = np.maximum(window_of(report.columns.arrival_ns[phases.rows], edges), 0)
    requests = np.bincount(window, minlength=count)
    return {
        name: np.divide(
            np.bincount(window, getattr(phases, name), count),
            requests,
            out=np.full(count, np.nan),
            where=requests > 0,
        )
        for name in NAMES
    }


def _bars(report: ReportData, suffix: str) -> list[tuple[str, dict[str, float]]]:
    phases = Phases.of(report)
    if not len(phases.queue_ms):
        return []
    return [(f"mean{suffix}", phases.means()), (f"slowest 1 %{suffix}", phases.means(phases.slowest()))]
