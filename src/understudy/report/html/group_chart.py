"""Plot the blocks that requests hold in each KV cache group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.report.html.charts import FULL, Card, time_axis
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.report.latency import NS_PER_S
from understudy.report.text import quantity

if TYPE_CHECKING:
    from understudy.report.report import Report

_STYLES = ("s1", "s4", "s2", "s3")


def group_card(report: Report) -> Card | None:
    """Plot held blocks by group over time; None for a run with one group."""
    found = report.run.kv_groups
    if found is None:
        return None
    x, seconds = time_axis(report, FULL)
    top = max(max(group.held_blocks) for group in found.groups)
    y = Scale.linear(max(top, 1), FULL.y, label=lambda blocks: f"{blocks:,.0f}")
    plot = Plot(FULL, x, y, "Blocks held by each KV cache group over time")
    start_s = report.columns.start_ns / NS_PER_S
    xs = (np.asarray(found.time_s) - start_s) / seconds
    series = []
    for number, group in enumerate(found.groups):
        style = _STYLES[number % len(_STYLES)] + (" thin" if number >= len(_STYLES) else "")
        name = f"{number}: {group.kind}" + (f" {group.window}" if group.window else "")
        plot.line(xs, np.asarray(group.held_blocks, np.float64), style)
        series.append(HoverSeries(name, style, [f"{blocks:,}" for blocks in group.held_blocks]))
    plot.on_hover(xs, [f"{time:.1f} s" for time in found.time_s], series)
    legend = tuple((one.style, one.name) for one in series)
    subtitle = f"blocks that requests hold; {quantity(found.hit_ratio, 'ratio')} of tokens hit"
    if found.full_attention_hit_ratio is not None:
        subtitle += f", full attention alone {quantity(found.full_attention_hit_ratio, 'ratio')}"
    return Card("KV cache groups", subtitle, plot.svg(), legend, "full")
