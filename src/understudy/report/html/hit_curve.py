"""Plot the prefix hit ratio by cache size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.charts import FULL, Card, percent
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.text import compact

if TYPE_CHECKING:
    from understudy.report.data import ReportData

POINTS = 160
VISIBLE_GAP = 0.001
"""Difference of hit ratios that the page explains."""


def hits_by_cache_size(report: ReportData) -> Card | None:
    """Plot the curve of a worker's LRU cache, this run's size and the limits; None without reuse or workload."""
    curve = report.hit_curve
    if curve is None or not curve.hit_tokens[-1]:
        return None
    one = report.columns.blocks_per_worker
    best = curve.unlimited_hit_ratio
    low = max(1, min(curve.smallest_blocks, one))
    high = max(2 * low, curve.distinct_blocks, one)
    sizes = np.unique(np.geomspace(low, high, POINTS).round().astype(np.int64))
    ratios = np.array([curve.hit_ratio(size) for size in sizes.tolist()])
    x = Scale.logarithmic(float(low), float(high), FULL.x)
    found = report.prefix_hit_ratio.first_admission
    y = Scale.linear(max(best, found, 0.01), FULL.y, label=percent)
    unit = f"{terms_of(report).block}s"
    plot = Plot(FULL, x, y, f"Prefix hit ratio by cache size in {unit}")
    plot.area(sizes.astype(np.float64), np.zeros(len(sizes)), ratios, "s4")
    plot.line(sizes.astype(np.float64), ratios, "s4")
    plot.rule(best, f"unlimited {percent(best)}", "s4", at_left=True)
    ratio = curve.hit_ratio(one)
    plot.upright(one, f"this run, {compact(one)}: {percent(found)}", "base", low=True)
    plot.marker(one, found, "s2")
    plot.on_hover(
        sizes.astype(np.float64),
        [f"{size:,} {unit}" for size in sizes.tolist()],
        [HoverSeries("prefix hit", "s4", [percent(ratio) for ratio in ratios.tolist()])],
    )
    return Card(
        "Hit ratio by cache size",
        f"{_describe_caches(report)}; {unit}, log scale. At this run's size: curve {percent(ratio)}, run "
        f"{percent(found)}{_explain_gap(report, found - ratio)}",
        plot.svg(),
        (),
        "full",
    )


def _describe_caches(report: ReportData) -> str:
    caches = "one LRU cache of all workers"
    if report.handoff is None:
        caches = "an LRU cache per worker" if report.columns.num_workers > 1 else "one LRU cache"
    return f"{caches}, requests in the order of this run, one at a time"


def _explain_gap(report: ReportData, gap: float) -> str:
    """Say why the run and the curve differ, where the difference would be seen."""
    if abs(gap) < VISIBLE_GAP:
        return ""
    if report.tiers is not None and gap > 0:
        return " with its tiers"
    if gap > 0:
        return ": the engine's own order of eviction keeps more"
    held = f"running requests hold their {terms_of(report).block}s"
    return f": {held}, and prompts that arrive together compute the same ones"
