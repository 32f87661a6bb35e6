"""Plot the prefix hit ratio by cache size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.charts import FULL, Card, percent
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.report.text import compact

if TYPE_CHECKING:
    from understudy.report.report import Report

POINTS = 160


def hits_by_cache_size(report: Report) -> Card | None:
    """Plot the curve of one LRU cache, this run's sizes and the limit; None without reuse or workload."""
    curve = report.hit_curve
    if curve is None or not curve.hit_tokens[-1]:
        return None
    one = report.columns.blocks_per_worker
    fleet = int(report.columns.worker_blocks.sum())
    best = curve.unlimited_hit_ratio
    low = max(1, min(curve.smallest_blocks, one))
    high = max(2 * low, curve.distinct_blocks, fleet)
    sizes = np.unique(np.geomspace(low, high, POINTS).round().astype(np.int64))
    ratios = np.array([curve.hit_ratio(size) for size in sizes.tolist()])
    x = Scale.logarithmic(float(low), float(high), FULL.x)
    y = Scale.linear(max(best, report.prefix_hit_ratio.first_admission, 0.01), FULL.y, label=percent)
    unit = f"{terms_of(report).block}s"
    plot = Plot(FULL, x, y, f"Prefix hit ratio by cache size in {unit}")
    plot.area(sizes.astype(np.float64), np.zeros(len(sizes)), ratios, "s4")
    plot.line(sizes.astype(np.float64), ratios, "s4")
    plot.rule(best, f"unlimited {percent(best)}", "s4", at_left=True)
    marks = [("one worker", one)]
    if report.columns.num_workers > 1:
        marks.append(("all workers", fleet))
    for row, (name, size) in enumerate(marks):
        ratio = curve.hit_ratio(size)
        low = ratio > 0.5 * y.high  # keep the label away from the curve
        plot.upright(size, f"{name}, {compact(size)}: {percent(ratio)}", "base", row=row, low=low)
    plot.on_hover(
        sizes.astype(np.float64),
        [f"{size:,} {unit}" for size in sizes.tolist()],
        [HoverSeries("prefix hit", "s4", [percent(ratio) for ratio in ratios.tolist()])],
    )
    return Card(
        "Hit ratio by cache size",
        f"one LRU cache that serves all requests in order, one at a time; {unit}, log scale. This run: "
        + percent(report.prefix_hit_ratio.first_admission),
        plot.svg(),
        (),
        "full",
    )
