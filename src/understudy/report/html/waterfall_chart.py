"""Plot where the time of the slowest percent went, for runs that recorded their steps."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.explain.describe import add_parts
from understudy.explain.waterfall import PARTS, Waterfalls
from understudy.report.html.charts import FULL, Card
from understudy.report.html.plot import number
from understudy.text import duration

if TYPE_CHECKING:
    from understudy.report.data import ReportData

LEFT, RIGHT, BAR, THIN, GAP, TOP = 330, 130, 13, 5, 8, 6
MAX_PARTS = 12
SAMPLED = 400
"""Requests that the mean request is computed from, evenly spaced over the workload."""


def slowest_by_part(report: ReportData) -> Card | None:
    """Plot the parts of the slowest percent's latency, and of the mean request; None without recorded steps."""
    if report.saved is None:
        return None
    waterfalls = Waterfalls(report.saved)
    ended = np.flatnonzero(report.columns.completed & (report.columns.output_tokens > 0))
    if not len(ended):
        return None
    latency = report.saved.latency_ns[ended]
    slowest = ended[np.argsort(-latency, kind="stable")[: max(1, len(ended) // 100)]]
    sample = ended[:: -(-len(ended) // SAMPLED)]
    slow = _mean_parts(waterfalls, slowest.tolist())
    usual = _mean_parts(waterfalls, sample.tolist())
    shown = sorted(slow, key=lambda part: -slow[part])[:MAX_PARTS]
    longest = max([*slow.values(), *(usual.get(part, 0.0) for part in shown)]) or 1.0
    scale = (FULL.width - LEFT - RIGHT) / longest
    total = sum(slow.values()) or 1.0
    shapes = []
    row = BAR + THIN + GAP
    for place, part in enumerate(shown):
        y = TOP + place * row
        width, thin = slow[part] * scale, usual.get(part, 0.0) * scale
        tip = f"{PARTS[part]}: {duration(slow[part] / 1e9)}; mean request {duration(usual.get(part, 0.0) / 1e9)}"
        shapes.append(
            f'<text class="tick name" x="{LEFT - 10}" y="{y + BAR / 2}" dy=".32em" text-anchor="end">'
            f"{escape(PARTS[part])}</text>"
            f'<path class="area solid s2" data-tip="{escape(tip)}" '
            f'd="M{LEFT} {y}h{number(width)}v{BAR}h{number(-width)}z"/>'
            f'<path class="area solid base" d="M{LEFT} {y + BAR}h{number(thin)}v{THIN}h{number(-thin)}z"/>'
            f'<text class="tick" x="{number(LEFT + max(width, thin) + 8)}" y="{y + BAR / 2}" dy=".32em">'
            f"{duration(slow[part] / 1e9)}, {slow[part] / total:.1%}</text>"
        )
    height = TOP + len(shown) * row
    left_out = len(slow) - len(shown)
    return Card(
        "Why the slowest percent is slow",
        f"parts of the latency, mean of {len(slowest):,} requests"
        + (f"; the {left_out} smallest parts are not shown" if left_out else ""),
        f'<div class="plot"><svg viewBox="0 0 {FULL.width} {height}" role="img" '
        f'aria-label="Parts of the latency of the slowest percent">{"".join(shapes)}</svg></div>',
        (("s2 solid", "slowest percent"), ("base solid", "mean request")),
        "full",
    )


def _mean_parts(waterfalls: Waterfalls, rows: list[int]) -> dict[str, float]:
    """Return the mean of each part in ns."""
    found = [waterfall.parts for row in rows if (waterfall := waterfalls.of(row)) is not None]
    return {part: value / len(found) for part, value in add_parts(found).items()}
