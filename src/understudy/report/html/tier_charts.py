"""Plot the tiers of a run: hits by tier, link use and residency over time, and load latencies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import Tier
from understudy.report.html import charts
from understudy.report.html.charts import HALF, SAMPLE_WINDOWS, Card
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale, latency_label, latency_scale
from understudy.report.latency import NS_PER_MS, NS_PER_S
from understudy.report.series import StepFunction, window_of, windows
from understudy.report.tier_table import format_link, list_limiting_links
from understudy.report.tiers import name_tier_use, name_unlimited_tiers, tier_hits
from understudy.run.tier_columns import SHARED, name_tier
from understudy.text import compact, duration, significant

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column
    from understudy.report.tiers import LinkUse

STYLES = {Tier.G1: "s1 solid", Tier.G2: "s4 solid", Tier.G3: "s2 solid", Tier.G4: "s3 solid"}
LINK_STYLES = ("s1", "s2", "s4", "s3", "s1 thin", "s2 thin", "s4 thin", "s3 thin")


def tier_cards(report: ReportData, baseline: ReportData | None) -> list[Card]:
    """Build all plots of tiers; empty for a run without tiers."""
    if report.tiers is None:
        return []
    cards = [_hits(report, baseline), _links(report), _residency(report), _onboards(report)]
    return [card for card in cards if card is not None]


def _hits(report: ReportData, baseline: ReportData | None) -> Card | None:
    """Plot the share of prompt tokens found on each tier, stacked."""
    timeline = report.columns
    assert report.tiers is not None
    assert timeline.tiers is not None
    rows = np.flatnonzero((timeline.first_admit_ns >= 0) & (timeline.arrival_ns >= 0))
    overall = report.prefix_hit_ratio.first_admission
    if math.isnan(overall):
        return None
    count = min(60, max(8, len(rows) // 40))
    edges = windows(timeline, count)
    window = window_of(timeline.arrival_ns[rows], edges)
    prompt = np.bincount(window, timeline.prompt_tokens[rows], count)
    shares = {}
    for tier in sorted({summary.tier for summary in timeline.tiers.tiers}, key=int):
        found = np.bincount(window, tier_hits(timeline, tier, first=True)[rows], count)
        shares[tier] = np.divide(found, prompt, out=np.full(count, np.nan), where=prompt > 0)
    before = baseline.prefix_hit_ratio.first_admission if baseline is not None else math.nan
    stacked = np.cumsum(list(shares.values()), axis=0)
    top = float(np.nanmax(np.append(stacked[-1], [overall, before])))
    x, seconds = charts.time_axis(report, HALF)
    y = Scale.linear(min(1.0, max(top, 0.01)), HALF.y, label=charts.percent)
    plot = Plot(HALF, x, y, "Prefix hits by tier and arrival time")
    xs = charts.middles(report, edges) / seconds
    low = np.where(np.isnan(stacked[0]), np.nan, 0.0)
    for tier, high in zip(shares, stacked, strict=True):
        plot.area(xs, low, high, STYLES[tier])
        low = high
    if before == before:
        plot.rule(before, "", "base")
    series = [
        HoverSeries(tier.name, STYLES[tier], _percents(share)) for tier, share in reversed(shares.items())
    ]
    plot.on_hover(xs, charts.window_labels(report, edges), series)
    width = duration((edges[1] - edges[0]) / NS_PER_S)
    legend = tuple((STYLES[tier], tier.name) for tier in shares)
    if before == before:
        legend += (("base", f"baseline {charts.percent(before)}"),)
    subtitle = f"share of prompt tokens, first admission, windows of {width}"
    return Card("Hits by tier", subtitle, plot.svg(), legend)


def _links(report: ReportData) -> Card | None:
    """Plot the utilisation of each link; the throughput if links are unlimited. None without duration."""
    assert report.tiers is not None
    if not report.duration_s:
        return None
    links = list_limiting_links(report.tiers)
    shares = [link for link in links if math.isfinite(link.bandwidth_gbps)]
    shown = shares or links
    edges = windows(report.columns, len(shown[0].window_bytes))
    values = [_over_time(link, bool(shares)) for link in shown]
    top = max(float(value.max()) for value in values)
    x, seconds = charts.time_axis(report, HALF)
    text = charts.percent if shares else _gbps
    y = Scale.linear(1.0 if shares and top > 0.5 else max(top, 1e-9), HALF.y, label=text)
    plot = Plot(HALF, x, y, "Link use over time")
    xs = charts.middles(report, edges) / seconds
    styles = [LINK_STYLES[at % len(LINK_STYLES)] for at in range(len(shown))]
    for value, style in zip(values, styles, strict=True):
        plot.line(xs, value, style)
    plot.on_hover(
        xs,
        charts.window_labels(report, edges),
        [
            HoverSeries(
                format_link(link),
                style,
                [
                    f"{text(one)}, {_gbps(moved / link.window_s / 1e9)}"
                    for one, moved in zip(value.tolist(), link.window_bytes, strict=True)
                ],
            )
            for link, style, value in zip(shown, styles, values, strict=True)
        ],
    )
    legend = tuple((style, format_link(link)) for link, style in zip(shown, styles, strict=True))
    subtitle = "share of bandwidth" if shares else "all links of a kind, unlimited"
    return Card("Links", subtitle, plot.svg(), legend)


def _residency(report: ReportData) -> Card | None:
    """Plot the residency of each tier with a limit, and the GPU blocks held by offloads."""
    timeline = report.columns
    tiers = timeline.tiers
    assert tiers is not None
    if not len(timeline.sample_time_ns) or not report.duration_s:
        return None
    edges = windows(timeline, SAMPLE_WINDOWS)
    capacity: dict[Tier, int] = {}
    unlimited = name_unlimited_tiers(report.run)
    limited = [summary for summary in tiers.tiers if name_tier_use(summary) not in unlimited]
    for summary in limited:
        capacity[summary.tier] = capacity.get(summary.tier, 0) + summary.capacity_blocks
    device = timeline.sample_used_blocks + timeline.sample_cached_blocks

    def share(blocks: np.ndarray[tuple[int], np.dtype[np.int64]], tier: Tier) -> Float64Column:
        return StepFunction.fleet(timeline, blocks).means(edges) / capacity[tier]

    lines = [
        ("G1", "s1", share(device, Tier.G1)),
        ("G1, held", "s1 thin", share(tiers.sample_held_blocks, Tier.G1)),
    ]
    if not any(name.endswith("g2") for name in unlimited):
        lines.append(("G2", "s4", share(tiers.sample_host_blocks, Tier.G2)))
    for summary in limited:
        if summary.tier in SHARED:
            means = StepFunction(*summary.residency).means(edges) / summary.capacity_blocks
            style = "s2" if summary.tier == Tier.G3 else "s3"
            lines.append((name_tier(summary), f"{style} thin" if summary.first_worker else style, means))
    top = max(float(values.max()) for _, _, values in lines)
    x, seconds = charts.time_axis(report, HALF)
    y = Scale.linear(1.0 if top > 0.5 else max(top, 1e-9), HALF.y, label=charts.percent)
    plot = Plot(HALF, x, y, "Residency of the tiers over time")
    xs = charts.middles(report, edges) / seconds
    for _, style, values in lines:
        plot.line(xs, values, style)
    labels = charts.window_labels(report, edges)
    plot.on_hover(xs, labels, [HoverSeries(name, style, _percents(values)) for name, style, values in lines])
    of = " and ".join(f"{capacity[tier]:,} ({tier.name})" for tier in sorted(capacity, key=int))
    legend = tuple((style, name) for name, style, _ in lines)
    return Card("Residency", f"share of {of} blocks", plot.svg(), legend)


def _onboards(report: ReportData) -> Card | None:
    """Plot the cumulative distribution of load latencies."""
    assert report.tiers is not None
    assert report.columns.tiers is not None
    took = np.sort(report.columns.tiers.onboard_ns / NS_PER_MS)
    if not len(took):
        return None
    values, parts = charts._quantiles(took, np.ones(len(took), np.int64))
    x = latency_scale(values, HALF.x, log=charts._needs_log_scale(values))
    plot = Plot(HALF, x, Scale.linear(1, HALF.y, label=charts.percent), "Cumulative distribution of loads")
    plot.steps(values, parts, "s1")
    stats = report.tiers.onboard_ms
    for p, value in ((0.50, stats.p50), (0.90, stats.p90), (0.99, stats.p99)):
        plot.marker(value, p, "s1")
    named = [(name, latency_label(getattr(stats, name))) for name in ("p50", "p90", "p99")]
    plot.corner(named, lower_right=x.pixel(stats.p50) < sum(HALF.x) / 2)
    labels = [f"{significant(100 * part, 4)} % of loads" for part in parts.tolist()]
    plot.on_hover(
        values, labels, [HoverSeries("took at most", "s1", [latency_label(v) for v in values.tolist()])]
    )
    return Card("Onboard latency", f"share of {len(took):,} loads", plot.svg())


def _over_time(link: LinkUse, share: bool) -> Float64Column:
    if share:
        return np.array(link.window_utilisation)
    return np.array(link.window_bytes) / link.window_s / 1e9


def _percents(values: Float64Column) -> list[str]:
    return ["" if value != value else charts.percent(value) for value in values.tolist()]


def _gbps(value: float) -> str:
    return f"{compact(value)} GB/s"
