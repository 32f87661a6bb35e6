"""Plot the balance of the workers: one strip per quantity, one bar per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.charts import HALF, Card
from understudy.report.html.plot import number
from understudy.report.html.scale import latency_label
from understudy.report.series import worker_means
from understudy.text import compact, significant

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column

MAX_BARS = 64
STRIPS_LEFT, STRIPS_RIGHT, STRIPS_TOP, STRIP_GAP, STRIP_PITCH = 124, 66, 8, 16, 56


def worker_balance(report: ReportData) -> Card | None:
    """Plot requests, tokens, waits, preemptions, prefix hits and KV usage by worker; None for one worker."""
    timeline = report.columns
    workers = timeline.num_workers
    if workers == 1:
        return None
    rows = np.flatnonzero((timeline.worker >= 0) & (timeline.first_admit_ns >= 0))
    if not len(rows):
        return None
    worker = timeline.worker[rows]
    requests = np.bincount(worker, minlength=workers).astype(np.float64)
    prompt = np.bincount(worker, timeline.prompt_tokens[rows], workers)
    output = np.bincount(worker, timeline.output_tokens[rows], workers)
    cached = np.bincount(worker, timeline.cached_tokens_first[rows], workers)
    hit = 100 * np.divide(cached, prompt, out=np.zeros(workers), where=prompt > 0)
    usage = 100 * worker_means(timeline, timeline.sample_used_blocks)[0] / timeline.worker_blocks
    strips = [
        ("requests", requests, "", "s1"),
        ("tokens", prompt + output, "", "s1"),
        ("TTFT, mean", _mean(report.latencies.ttft_ms, report), " ms", "s2"),
        ("queue, mean", _mean(report.latencies.queue_ms, report), " ms", "s2"),
        (terms_of(report).requeued, np.bincount(worker, timeline.preemptions[rows], workers), "", "s2"),
        ("prefix hit", hit, " %", "s4"),
        (f"{terms_of(report).usage}, mean", np.nan_to_num(usage), " %", "s1"),
    ]
    order = np.arange(workers)
    note = "one bar per worker, in order"
    if workers > MAX_BARS:
        # Too many bars to distinguish: sort by load and sample evenly, including both ends.
        by_load = np.argsort(-(prompt + output), kind="stable")
        order = by_load[np.linspace(0, workers - 1, MAX_BARS).round().astype(np.int64)]
        note = f"{MAX_BARS} of {workers:,} workers, from the most to the fewest tokens"
    return Card("Balance of the workers", note, _strips(strips, order))


def _mean(values_ms: Float64Column, report: ReportData) -> Float64Column:
    """Return the mean per worker over requests that have a value; 0 without any."""
    timeline = report.columns
    rows = np.flatnonzero((timeline.worker >= 0) & ~np.isnan(values_ms))
    count = np.bincount(timeline.worker[rows], minlength=timeline.num_workers)
    total = np.bincount(timeline.worker[rows], values_ms[rows], timeline.num_workers)
    return np.divide(total, count, out=np.zeros(timeline.num_workers), where=count > 0)


def _strips(
    strips: list[tuple[str, Float64Column, str, str]], order: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> str:
    width, height = HALF.width, STRIPS_TOP + len(strips) * STRIP_PITCH
    left, right = STRIPS_LEFT, width - STRIPS_RIGHT
    strip = (height - STRIPS_TOP) / len(strips) - STRIP_GAP
    pitch = (right - left) / len(order)
    bar = min(pitch * 0.72, 56)
    centres = [left + pitch * (place + 0.5) for place in range(len(order))]
    parts = []
    series = []
    for index, (name, values, unit, style) in enumerate(strips):
        floor = STRIPS_TOP + index * (strip + STRIP_GAP) + strip
        top = float(values.max())
        mean = float(values.mean())
        heights = (values[order] / top if top else np.zeros(len(order))) * strip
        shapes = "".join(
            f"M{number(x - bar / 2)} {number(floor)}v{number(-h)}h{number(bar)}v{number(h)}z"
            for x, h in zip(centres, heights.tolist(), strict=True)
        )
        # Without a mean (all zero) there is no ratio to show.
        spread = f"max ÷ mean {significant(top / mean)}" if mean else ""
        parts.append(
            f'<path class="grid" d="M{left} {number(floor - strip)}H{right}"/>'
            f'<path class="area solid {style}" d="{shapes}"/>'
            f'<path class="axis" d="M{left} {number(floor)}H{right}"/>'
            f'<text class="tick name" x="{left - 10}" y="{number(floor - strip / 2 - 7)}" dy=".32em" text-anchor="end">'
            f"{name}</text>"
            f'<text class="tick" x="{left - 10}" y="{number(floor - strip / 2 + 8)}" dy=".32em" text-anchor="end">'
            f"{spread}</text>"
            f'<text class="tick" x="{right + 8}" y="{number(floor - strip)}" dy=".32em">{_label(top, unit)}</text>'
            f'<text class="tick" x="{right + 8}" y="{number(floor)}" dy=".32em">0</text>'
        )
        texts = [_label(value, unit) for value in values[order].tolist()]
        series.append({"name": name, "style": style, "text": texts})
    hover = {
        "px": [number(x) for x in centres],
        "label": [f"worker {index}" for index in order.tolist()],
        "series": series,
    }
    return (
        f'<div class="plot"><svg viewBox="0 0 {width} {height}" role="img" aria-label="Load by worker" '
        f'data-top="{STRIPS_TOP}" data-bottom="{number(height - STRIP_GAP)}">{"".join(parts)}'
        f'<path class="cross" d=""/></svg>'
        f'<script type="application/json">{msgspec.json.encode(hover).decode()}</script></div>'
    )


def _label(value: float, unit: str) -> str:
    return latency_label(value) if unit == " ms" else compact(value) + unit
