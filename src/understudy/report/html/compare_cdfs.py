"""Plot the latency distributions of compared reports over each other, from their saved percentiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.report.html.charts import SMALL, Card, percent
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import LOG_FROM_RATIO, Scale, latency_label, latency_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

STYLES = ("base", "s1", "s2", "s4", "s3", "base ink")
"""Style of each run's line, the first being the reference."""
_PARTS = {"min": 0.0, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
_LATENCIES = {"ttft_ms": "Time to first token", "e2e_ms": "Request latency", "itl_ms": "Inter-token latency"}


def compare_cdfs(names: Sequence[str], reports: Sequence[dict[str, Any]]) -> list[Card]:
    """Plot TTFT, E2E and ITL of all reports; a latency without values in any report has no plot."""
    return [
        card
        for key, title in _LATENCIES.items()
        if (card := _plot_latency(key, title, names, reports)) is not None
    ]


def _plot_latency(
    key: str, title: str, names: Sequence[str], reports: Sequence[dict[str, Any]]
) -> Card | None:
    lines = [
        (name, STYLES[place % len(STYLES)], np.array([report[key][part] for part in _PARTS], np.float64))
        for place, (name, report) in enumerate(zip(names, reports, strict=True))
        if all(report[key].get(part) is not None for part in _PARTS)
    ]
    if not lines:
        return None
    everything = np.concatenate([values for *_, values in lines])
    positive = everything[everything > 0]
    log = bool(len(positive)) and float(positive.max() / positive.min()) > LOG_FROM_RATIO
    x = latency_scale(everything, SMALL.x, log=log)
    plot = Plot(SMALL, x, Scale.linear(1, SMALL.y, label=percent), f"Cumulative distribution of {title}")
    parts = np.array(list(_PARTS.values()))
    for _, style, values in lines:
        plot.line(values, parts, style)
    widest = max(lines, key=lambda line: float(line[2][-1]))[2]
    plot.on_hover(
        widest,
        list(_PARTS),
        [
            HoverSeries(name, style, [latency_label(value) for value in values.tolist()])
            for name, style, values in lines
        ],
    )
    legend = tuple((style, name) for name, style, _ in lines)
    subtitle = f"lines join the saved percentiles{', log scale' if x.log else ''}"
    return Card(title, subtitle, plot.svg(), legend, "third")
