"""Plot the KV usage of each worker over time as a heat map, one row per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.charts import FULL, Card, middles, time_axis
from understudy.report.html.plot import number
from understudy.report.series import StepFunction, windows
from understudy.text import duration

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column

WINDOWS, MAX_ROWS, LEVELS = 120, 64, 10
LEFT, TOP, BOTTOM = 52, 6, 24


def usage_by_worker(report: ReportData) -> Card | None:
    """Plot the share of each worker's blocks in use, per window; None for a single worker."""
    timeline = report.columns
    if timeline.num_workers == 1 or not len(timeline.sample_time_ns):
        return None
    edges = windows(timeline, WINDOWS)
    usage = np.zeros((timeline.num_workers, WINDOWS))
    order = np.lexsort((timeline.sample_time_ns, timeline.sample_worker))
    first = np.searchsorted(timeline.sample_worker[order], np.arange(timeline.num_workers + 1))
    for worker in range(timeline.num_workers):
        own = order[first[worker] : first[worker + 1]]
        held = StepFunction(timeline.sample_time_ns[own], timeline.sample_used_blocks[own])
        usage[worker] = held.means(edges) / timeline.worker_blocks[worker]
    shown = np.arange(timeline.num_workers)
    note = "one row per worker, in order"
    if timeline.num_workers > MAX_ROWS:
        # Sort by usage and sample evenly, including both ends.
        by_usage = np.argsort(-usage.mean(axis=1), kind="stable")
        shown = by_usage[np.linspace(0, timeline.num_workers - 1, MAX_ROWS).round().astype(np.int64)]
        note = f"{MAX_ROWS} of {timeline.num_workers:,} workers, from the fullest to the emptiest"
    return Card(
        "KV usage by worker",
        f"{note}; active {terms_of(report).block}s, mean of windows of {duration((edges[1] - edges[0]) / 1e9)}",
        _figure(report, usage[shown], shown, edges),
        tuple((f"s1 heat{level}", f"{10 * level} %") for level in (1, 4, 7, 10)),
        "full",
    )


def _figure(
    report: ReportData,
    usage: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    workers: np.ndarray[tuple[int], np.dtype[np.int64]],
    edges_ns: Float64Column,
) -> str:
    rows = len(usage)
    pitch = min(26.0, max(5.0, 320 / rows))
    height = TOP + rows * pitch + BOTTOM
    axis, seconds = time_axis(report, FULL)
    xs = axis.pixels((edges_ns - report.columns.start_ns) / 1e9 / seconds)
    level = np.clip(np.ceil(usage * LEVELS), 0, LEVELS).astype(np.int64)
    cells: dict[int, list[str]] = {}
    for row in range(rows):
        y = number(TOP + row * pitch)
        starts = np.flatnonzero(np.diff(level[row], prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), WINDOWS], strict=True):
            width = number(float(xs[stop] - xs[start]))
            shape = f"M{number(float(xs[start]))} {y}h{width}v{number(pitch - 1)}h-{width}z"
            cells.setdefault(int(level[row, start]), []).append(shape)
    marks = "".join(
        f'<path class="area s1 heat{one}" d="{"".join(shapes)}"/>'
        for one, shapes in sorted(cells.items())
        if one
    )
    step = max(1, round(14 / pitch))
    names = "".join(
        f'<text class="tick" x="{LEFT - 8}" y="{number(TOP + (row + 0.5) * pitch)}" dy=".32em" text-anchor="end">'
        f"{workers[row]}</text>"
        for row in range(0, rows, step)
    )
    floor = number(TOP + rows * pitch)
    ticks = "".join(
        f'<text class="tick" x="{number(min(axis.pixel(value), FULL.width - 20))}" y="{floor + 16}" '
        f'text-anchor="middle">{label}</text>'
        for value, label in axis.ticks
    )
    hottest = usage.argmax(axis=0)
    hover = {
        "px": [number(x) for x in ((xs[:-1] + xs[1:]) / 2).tolist()],
        "label": [f"after {duration(second)}" for second in middles(report, edges_ns).tolist()],
        "series": [
            {
                "name": "fullest",
                "style": "s1",
                "text": [
                    f"worker {workers[row]}, {usage[row, window]:.0%}"
                    for window, row in enumerate(hottest.tolist())
                ],
            },
            {
                "name": "mean",
                "style": "base",
                "text": [f"{share:.0%}" for share in usage.mean(axis=0).tolist()],
            },
        ],
    }
    return (
        f'<div class="plot"><svg viewBox="0 0 {FULL.width} {number(height)}" role="img" '
        f'aria-label="KV usage by worker over time" data-top="{TOP}" data-bottom="{floor}">{marks}{names}{ticks}'
        f'<path class="cross" d=""/></svg>'
        f'<script type="application/json">{msgspec.json.encode(hover).decode()}</script></div>'
    )
