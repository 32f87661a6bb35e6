"""Plot prefill and decode workers: parts of the TTFT, blocks kept for others, links, and a table of both pools."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.handoff_table import name_link
from understudy.report.html import charts
from understudy.report.html.charts import FULL, HALF, Card
from understudy.report.html.plot import HoverSeries, Plot, number
from understudy.report.html.scale import Scale
from understudy.report.html.tier_tables import build_table
from understudy.report.latency import NS_PER_MS
from understudy.report.metrics import BY_KEY
from understudy.report.series import windows
from understudy.text import compact, duration, fixed, size

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.handoff import HandOffReport
    from understudy.report.html.plot import Size


PART_STYLES = ("s3", "s1", "base", "s2", "s4", "s5", "base ink")
LINK_STYLES = ("s1", "s4", "s2")
LEFT, RIGHT, BAR, GAP, TOP = 150, 90, 34, 22, 10
POOL_COLUMNS = {
    "workers": "Workers",
    "busy_mean": "Busy, mean",
    "busy_max": "max",
    "running_mean": "Running, mean",
    "kv_usage_mean": "KV usage, mean",
    "held_mean": "Kept for others, mean",
    "held_max": "max",
}
LINK_COLUMNS = {
    "bandwidth_gbps": "Bandwidth",
    "transfers": "Transfers",
    "bytes": "Bytes",
    "busy": "Busy share",
    "utilisation_mean": "Used, mean",
    "utilisation_max": "Used, max",
    "peak": "Used, peak",
}


def handoff_cards(report: ReportData) -> list[Card]:
    """Build all plots of prefill and decode workers; empty for a run without roles, hand-offs or duration."""
    handoff = report.handoff
    if handoff is None or not handoff.remote or not report.duration_s:
        return []
    if not handoff.bytes:  # the KV bytes of a token are not known
        return [_parts(report), _kept(report, handoff, FULL, "full")]
    return [_parts(report), _kept(report, handoff, HALF, "half"), _links(report, handoff)]


def _parts(report: ReportData) -> Card:
    """Plot the parts of the TTFT: of the mean request, and of the slowest percent."""
    timeline = report.columns
    assert timeline.handoff is not None
    columns = timeline.handoff.ttft_parts_ns(timeline.arrival_ns, timeline.first_token_ns)
    total = np.sum(list(columns.values()), axis=0)
    slowest = np.argsort(-total, kind="stable")[: max(1, len(total) // 100)]
    bars = {
        "mean": {name: float(part.mean()) / NS_PER_MS for name, part in columns.items()},
        "slowest 1 %": {name: float(part[slowest].mean()) / NS_PER_MS for name, part in columns.items()},
    }
    scale = (FULL.width - LEFT - RIGHT) / (max(sum(parts.values()) for parts in bars.values()) or 1.0)
    shapes = []
    for place, (label, parts) in enumerate(bars.items()):
        x, y = float(LEFT), TOP + place * (BAR + GAP)
        shapes.append(
            f'<text class="tick name" x="{LEFT - 10}" y="{y + BAR / 2}" dy=".32em" text-anchor="end">{label}</text>'
        )
        for (name, value), style in zip(parts.items(), PART_STYLES, strict=False):
            if (width := value * scale) > 0:
                shapes.append(
                    f'<path class="area solid {style}" data-tip="{name} {duration(value / 1e3)}" '
                    f'd="M{number(x)} {y}h{number(width)}v{BAR}h{number(-width)}z"/>'
                )
            x += width
        shapes.append(
            f'<text class="tick" x="{number(x + 8)}" y="{y + BAR / 2}" dy=".32em">'
            f"{duration(sum(parts.values()) / 1e3)}</text>"
        )
    return Card(
        "TTFT of handed-off requests",
        f"{len(total):,} requests; where the time to the first token went",
        f'<div class="plot"><svg viewBox="0 0 {FULL.width} {TOP + len(bars) * (BAR + GAP)}" role="img" '
        f'aria-label="Parts of the time to the first token">{"".join(shapes)}</svg></div>',
        tuple((f"{style} solid", name) for name, style in zip(columns, PART_STYLES, strict=False)),
        "full",
    )


def _kept(report: ReportData, handoff: HandOffReport, frame: Size, span: str) -> Card:
    """Plot the blocks that prefill workers keep for decode workers."""
    kept = np.array(handoff.window_held)
    edges = windows(report.columns, len(kept))
    x, seconds = charts.time_axis(report, frame)
    top = float(kept.max())
    y = Scale.linear(1.0 if top > 0.5 else max(top, 1e-9), frame.y, label=charts.percent)
    plot = Plot(frame, x, y, "Blocks that prefill workers keep for decode workers")
    xs = charts.middles(report, edges) / seconds
    plot.area(xs, np.zeros_like(kept), kept, "s1")
    plot.line(xs, kept, "s1")
    texts = [charts.percent(value) for value in kept.tolist()]
    plot.on_hover(xs, charts.window_labels(report, edges), [HoverSeries("kept", "s1", texts)])
    subtitle = "share of the prefill workers' blocks"
    return Card("Blocks kept for decode workers", subtitle, plot.svg(), span=span)


def _links(report: ReportData, handoff: HandOffReport) -> Card:
    """Plot the share of each kind of link that is in use; the throughput if none has a limit."""
    limited = [link for link in handoff.links if math.isfinite(link.bandwidth_gbps)]
    shown = limited or list(handoff.links[:1])
    edges = windows(report.columns, len(shown[0].window_bytes))
    values = [
        np.array(link.window_utilisation if limited else link.window_bytes)
        / (1 if limited else link.window_s * 1e9)
        for link in shown
    ]
    top = max(float(value.max()) for value in values)
    x, seconds = charts.time_axis(report, HALF)
    text = charts.percent if limited else _gbps
    y = Scale.linear(1.0 if limited and top > 0.5 else max(top, 1e-9), HALF.y, label=text)
    plot = Plot(HALF, x, y, "Links of hand-offs over time")
    xs = charts.middles(report, edges) / seconds
    series = []
    for link, value, style in zip(shown, values, LINK_STYLES, strict=False):
        plot.line(xs, value, style)
        moved = [_gbps(one / link.window_s / 1e9) for one in link.window_bytes]
        texts = [f"{text(share)}, {rate}" for share, rate in zip(value.tolist(), moved, strict=True)]
        series.append(HoverSeries(name_link(link), style, texts if limited else moved))
    plot.on_hover(xs, charts.window_labels(report, edges), series)
    legend = tuple((style, name_link(link)) for link, style in zip(shown, LINK_STYLES, strict=False))
    return Card(
        "Links of hand-offs", "share of bandwidth" if limited else "no limit was given", plot.svg(), legend
    )


def handoff_tables(report: ReportData) -> str:
    """Build one card with requests by way, both pools and the links; empty for a run without roles."""
    handoff = report.handoff
    if handoff is None:
        return ""
    numbers = [
        ("handoff.remote", f"{handoff.remote:,}"),
        ("handoff.local", f"{handoff.local:,}"),
        ("handoff.fallback", f"{handoff.fallback:,}"),
        ("handoff.failed", f"{handoff.failed:,}"),
        ("handoff.bytes", size(handoff.bytes)),
        ("handoff.transfer_ms", f"mean {fixed(handoff.transfer_ms.mean)} ms"),
        ("handoff.transfer_ms", f"p99 {fixed(handoff.transfer_ms.p99)} ms"),
        ("handoff.expired_leases", f"{handoff.expired_leases:,}"),
        ("handoff.late_notifications", f"{handoff.late_notifications:,}"),
    ]
    rows = "".join(
        f'<div><span data-tip="{escape(BY_KEY[key].definition)}" tabindex="0">{escape(BY_KEY[key].name)}</span>'
        f"<span>{escape(value)}</span></div>"
        for key, value in numbers
    )
    pools = build_table(
        "Pool", "handoff.pools[].", POOL_COLUMNS, [(pool.role, pool) for pool in handoff.pools]
    )
    links = build_table(
        "Link", "handoff.links[].", LINK_COLUMNS, [(name_link(link), link) for link in handoff.links]
    )
    return (
        '<section class="card full"><div class="head"><h2>Prefill and decode workers</h2><span class="sub">hover over '
        f'a name for its definition</span></div>{pools}{links}<div class="columns">{rows}</div></section>'
    )


def _gbps(value: float) -> str:
    return f"{compact(value)} GB/s"
