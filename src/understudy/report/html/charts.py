"""Build the plots of a report's page. Each function returns a card, or None if the run has no data for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.plot import HoverSeries, Plot, Size
from understudy.report.html.scale import LOG_FROM_RATIO, Scale, latency_label, latency_scale, time_unit
from understudy.report.latency import NS_PER_MS, NS_PER_S, present
from understudy.report.series import StepFunction, window_of, window_percentile, windows
from understudy.report.statistics import nearest_rank
from understudy.text import compact, duration, significant

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column
    from understudy.workload.columns import Int64Column

SMALL, HALF, FULL = Size(404, 250), Size(624, 270), Size(1264, 280)

SAMPLE_WINDOWS = 240
LATENCY_WINDOWS = 120
MAX_DOTS = 5_000
FEW_DOTS = 300
CDF_POINTS = 200


@dataclass(frozen=True, slots=True)
class Card:
    """A plot with its title and legend; `legend` pairs style and name."""

    title: str
    subtitle: str
    figure: str
    legend: tuple[tuple[str, str], ...] = ()
    span: str = "half"


def render_card(card: Card) -> str:
    """Return the card as a section of a page."""
    keys = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for style, name in card.legend)
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return (
        f'<section class="card {card.span}"><div class="head"><h2>{escape(card.title)}</h2>'
        f'<span class="sub">{escape(card.subtitle)}</span>{legend}</div>{card.figure}</section>'
    )


def latency_cdfs(report: ReportData, baseline: ReportData | None) -> list[Card]:
    """Plot the cumulative distributions of TTFT and E2E (over requests) and ITL (over gaps)."""
    cards = []
    for title, column, of in (
        ("Time to first token", "ttft_ms", "requests"),
        ("Request latency", "e2e_ms", "requests"),
        ("Inter-token latency", "itl_ms", "gaps"),
    ):
        values, parts = _quantiles(*_count_values(report, column))
        if not len(values):
            continue
        others, other_parts = (
            _quantiles(*_count_values(baseline, column)) if baseline is not None else (values[:0],) * 2
        )
        everything = np.concatenate([values, others])
        x = latency_scale(everything, SMALL.x, log=_needs_log_scale(everything))
        y = Scale.linear(1, SMALL.y, label=percent)
        plot = Plot(SMALL, x, y, f"Cumulative distribution of {title}")
        if len(others):
            plot.steps(others, other_parts, "base")
        plot.steps(values, parts, "s1")
        stats = getattr(report, column)
        for p, value in ((0.50, stats.p50), (0.90, stats.p90), (0.99, stats.p99)):
            plot.marker(value, p, "s1")
        named = [(name, latency_label(getattr(stats, name))) for name in ("p50", "p90", "p99")]
        plot.corner(named, lower_right=x.pixel(stats.p50) < sum(SMALL.x) / 2)
        series = [HoverSeries("this run", "s1", [latency_label(value) for value in values.tolist()])]
        if len(others):
            at = np.minimum(np.searchsorted(other_parts, parts - 1e-12), len(others) - 1)
            series.append(HoverSeries("baseline", "base", [latency_label(v) for v in others[at].tolist()]))
        plot.on_hover(values, [f"{significant(100 * part, 4)} % of {of}" for part in parts.tolist()], series)
        legend = (("base", "baseline"),) if len(others) else ()
        cards.append(Card(title, f"share of {of}", plot.svg(), legend, "third"))
    return cards


def ttft_over_time(report: ReportData, baseline: ReportData | None = None) -> Card | None:
    """Plot TTFT by arrival: a dot per request, or percentiles per window if there are many; the baseline's median."""
    timeline = report.columns
    rows = np.flatnonzero(~np.isnan(report.latencies.ttft_ms))
    if not len(rows):
        return None
    ttft_ms = report.latencies.ttft_ms[rows]
    arrival_ns = timeline.arrival_ns[rows]
    x, seconds = time_axis(report, FULL)
    title = "Time to first token by arrival time"
    before_xs, before = _median_ttft(baseline, x.high * seconds)
    known = (("base", "baseline, p50"),) if len(before) else ()
    if len(rows) <= MAX_DOTS:
        shown = np.concatenate([ttft_ms, before])
        plot = Plot(FULL, x, latency_scale(shown, FULL.y, log=_needs_log_scale(shown)), title)
        plot.line(before_xs / seconds, before, "base")
        xs = since_start(report, arrival_ns) / seconds
        plot.dots(xs, ttft_ms, "s1 few" if len(rows) <= FEW_DOTS else "s1")
        labels = [
            f"request {row}: {latency_label(value)}"
            for row, value in zip(rows.tolist(), ttft_ms.tolist(), strict=True)
        ]
        plot.on_hover_dots(xs, ttft_ms, labels)
        subtitle = f"one dot per request, by arrival{_log(plot.y)}"
        return Card("TTFT over time", subtitle, plot.svg(), known, "full")
    edges = windows(timeline, LATENCY_WINDOWS)
    window = window_of(arrival_ns, edges)
    p50, p90, p99 = (window_percentile(ttft_ms, window, LATENCY_WINDOWS, p) for p in (50, 90, 99))
    shown = present(np.concatenate([p50, p90, p99, before]))
    plot = Plot(FULL, x, latency_scale(shown, FULL.y, log=_needs_log_scale(shown)), title)
    xs = middles(report, edges) / seconds
    plot.line(before_xs / seconds, before, "base")
    plot.area(xs, p50, p90, "s1")
    plot.line(xs, p99, "s2")
    plot.line(xs, p90, "s1 thin")
    plot.line(xs, p50, "s1")
    plot.on_hover(
        xs,
        window_labels(report, edges),
        [
            HoverSeries(
                name, style, ["" if value != value else latency_label(value) for value in values.tolist()]
            )
            for name, style, values in (("p99", "s2", p99), ("p90", "s1 thin", p90), ("p50", "s1", p50))
        ],
    )
    width = duration((edges[1] - edges[0]) / NS_PER_S)
    legend = (("s1", "p50"), ("s1 thin", "p90"), ("s2", "p99"), *known)
    subtitle = f"percentiles by arrival in windows of {width}{_log(plot.y)}"
    return Card("TTFT over time", subtitle, plot.svg(), legend, "full")


def running_waiting(report: ReportData, baseline: ReportData | None = None) -> Card | None:
    """Plot the running and waiting requests of all workers, and the baseline's running requests."""
    timeline = report.columns
    if not len(timeline.sample_time_ns):
        return None
    edges = windows(timeline, SAMPLE_WINDOWS)
    running = StepFunction.fleet(timeline, timeline.sample_running).means(edges)
    waiting = StepFunction.fleet(timeline, timeline.sample_waiting).means(edges)
    x, seconds = time_axis(report, HALF)
    before_xs, before = _sampled(baseline, "sample_running", x.high * seconds)
    y = Scale.linear(float(max(running.max(), waiting.max(), before.max(initial=0))), HALF.y)
    plot = Plot(HALF, x, y, "Running and waiting requests over time")
    xs = middles(report, edges) / seconds
    plot.area(xs, np.zeros_like(running), running, "s1")
    plot.line(before_xs / seconds, before, "base thin")
    plot.line(xs, running, "s1")
    plot.line(xs, waiting, "s2")
    plot.on_hover(
        xs,
        window_labels(report, edges),
        [
            HoverSeries("running", "s1", [compact(value) for value in running.tolist()]),
            HoverSeries("waiting", "s2", [compact(value) for value in waiting.tolist()]),
        ],
    )
    subtitle = "requests on all workers"
    legend = [("s1", "running"), ("s2", "waiting")]
    if len(before):
        legend.append(("base", "running, baseline"))
    return Card("Running and waiting", subtitle, plot.svg(), tuple(legend))


def kv_usage(report: ReportData, baseline: ReportData | None = None) -> Card | None:
    """Plot active and cached blocks, stacked, as a share of capacity; the baseline's active blocks."""
    timeline = report.columns
    if not len(timeline.sample_time_ns):
        return None
    edges = windows(timeline, SAMPLE_WINDOWS)
    capacity = int(timeline.worker_blocks.sum())
    active = StepFunction.fleet(timeline, timeline.sample_used_blocks).means(edges) / capacity
    cached = StepFunction.fleet(timeline, timeline.sample_cached_blocks).means(edges) / capacity
    x, seconds = time_axis(report, HALF)
    before_xs, before = _sampled(baseline, "sample_used_blocks", x.high * seconds)
    if baseline is not None:
        before = before / int(baseline.columns.worker_blocks.sum())
    top = float(max((active + cached).max(), before.max(initial=0)))
    y = Scale.linear(1.0 if top > 0.5 else max(top, 1e-9), HALF.y, label=percent)
    plot = Plot(HALF, x, y, "KV cache usage over time")
    xs = middles(report, edges) / seconds
    plot.area(xs, np.zeros_like(active), active, "s1 solid")
    plot.area(xs, active, active + cached, "s3 solid")
    plot.line(before_xs / seconds, before, "base")
    plot.on_hover(
        xs,
        window_labels(report, edges),
        [
            HoverSeries("cached", "s3 solid", [percent(value) for value in cached.tolist()]),
            HoverSeries("active", "s1 solid", [percent(value) for value in active.tolist()]),
        ],
    )
    subtitle = f"share of {capacity:,} {terms_of(report).block}s, mean of each window"
    legend = [("s1 solid", "active"), ("s3 solid", "cached")]
    if len(before):
        legend.append(("base", "active, baseline"))
    return Card("KV cache", subtitle, plot.svg(), tuple(legend))


def prefix_hits(report: ReportData, baseline: ReportData | None, span: str) -> Card | None:
    """Plot the prefix hit ratio at first admission, by arrival."""
    timeline = report.columns
    rows = np.flatnonzero((timeline.first_admit_ns >= 0) & (timeline.arrival_ns >= 0))
    overall = report.prefix_hit_ratio.first_admission
    if overall != overall:
        return None
    size = FULL if span == "full" else HALF
    count = min(60, max(8, len(rows) // 40))
    edges = windows(timeline, count)
    window = window_of(timeline.arrival_ns[rows], edges)
    cached = np.bincount(window, timeline.cached_tokens_first[rows], count)
    prompt = np.bincount(window, timeline.prompt_tokens[rows], count)
    hit = np.divide(cached, prompt, out=np.full(count, np.nan), where=prompt > 0)
    x, seconds = time_axis(report, size)
    before = baseline.prefix_hit_ratio.first_admission if baseline is not None else np.nan
    top = float(np.nanmax(np.append(hit, [overall, before])))
    y = Scale.linear(min(1.0, max(top, 0.01)), size.y, label=percent)
    plot = Plot(size, x, y, "Prefix hit ratio by arrival time")
    xs = middles(report, edges) / seconds
    plot.area(xs, np.zeros_like(hit), hit, "s4")
    plot.line(xs, hit, "s4")
    if before == before:
        plot.rule(before, "", "base")
    plot.rule(overall, "", "s4")
    texts = ["" if value != value else percent(value) for value in hit.tolist()]
    plot.on_hover(xs, window_labels(report, edges), [HoverSeries("prefix hit", "s4", texts)])
    width = duration((edges[1] - edges[0]) / NS_PER_S)
    subtitle = f"share of prompt tokens, first admission, by arrival in windows of {width}"
    legend = [("s4", f"overall {percent(overall)}")]
    if before == before:
        legend.append(("base", f"baseline {percent(before)}"))
    return Card("Prefix hit ratio", subtitle, plot.svg(), tuple(legend), span)


def _median_ttft(baseline: ReportData | None, until_s: float) -> tuple[Float64Column, Float64Column]:
    """Return times (s) and median TTFT of the baseline by arrival, up to `until_s`."""
    if baseline is None or not len(rows := np.flatnonzero(~np.isnan(baseline.latencies.ttft_ms))):
        return np.empty(0), np.empty(0)
    edges = windows(baseline.columns, LATENCY_WINDOWS)
    window = window_of(baseline.columns.arrival_ns[rows], edges)
    p50 = window_percentile(baseline.latencies.ttft_ms[rows], window, LATENCY_WINDOWS, 50)
    xs = middles(baseline, edges)
    shown = (xs <= until_s) & ~np.isnan(p50)
    return xs[shown], p50[shown]


def _sampled(baseline: ReportData | None, column: str, until_s: float) -> tuple[Float64Column, Float64Column]:
    """Return times (s) and means of a sample column of the baseline, up to `until_s`."""
    if baseline is None or not len(baseline.columns.sample_time_ns):
        return np.empty(0), np.empty(0)
    edges = windows(baseline.columns, SAMPLE_WINDOWS)
    values = StepFunction.fleet(baseline.columns, getattr(baseline.columns, column)).means(edges)
    xs = middles(baseline, edges)
    return xs[xs <= until_s], values[xs <= until_s]


def _count_values(report: ReportData, column: str) -> tuple[Float64Column, Int64Column]:
    """Return the ascending values of a latency and the count of each."""
    if column == "itl_ms":
        return report.columns.itl_ns / NS_PER_MS, report.columns.itl_count
    values = np.sort(present(getattr(report.latencies, column)))
    return values, np.ones(len(values), np.int64)


def _quantiles(values: Float64Column, counts: Int64Column) -> tuple[Float64Column, Float64Column]:
    """Return points of the distribution function: all values if there are few, else evenly spaced and the tail."""
    if not len(values):
        return values, values
    cumulative = np.cumsum(counts)
    count = int(cumulative[-1])
    if len(values) <= CDF_POINTS:
        return values, cumulative / count
    parts = sorted({*range(0, 10_001, 10_000 // CDF_POINTS), 9910, 9930, 9970, 9980, 9990, 9995, 9999})
    ranks = np.array([nearest_rank(part, count, 10_000) for part in parts])
    at = np.unique(np.searchsorted(cumulative, ranks, side="right"))
    return values[at], cumulative[at] / count


def _needs_log_scale(values: Float64Column) -> bool:
    positive = values[values > 0]
    return bool(len(positive)) and float(positive.max() / positive.min()) > LOG_FROM_RATIO


def _log(scale: Scale) -> str:
    return ", log scale" if scale.log else ""


def percent(share: float) -> str:
    """Format a share in percent, with three significant digits."""
    return f"{significant(100 * share)} %"


def time_axis(report: ReportData, size: Size) -> tuple[Scale, float]:
    """Return the time axis and the length of its unit in seconds; the last label names the unit."""
    span_s = max(report.duration_s, 1e-9)
    seconds, unit = time_unit(span_s)
    axis = Scale.linear(span_s / seconds, size.x, target=max(4, size.width // 110), exact=True)
    *ticks, (value, label) = axis.ticks
    return replace(axis, ticks=(*ticks, (value, f"{label} {unit}"))), seconds


def since_start(report: ReportData, times_ns: Int64Column | Float64Column) -> Float64Column:
    """Convert times to seconds from the start of the run."""
    result: Float64Column = (times_ns - report.columns.start_ns) / NS_PER_S
    return result


def middles(report: ReportData, edges_ns: Float64Column) -> Float64Column:
    """Return the middle of each window in seconds from the start of the run."""
    return since_start(report, (edges_ns[:-1] + edges_ns[1:]) / 2)


def window_labels(report: ReportData, edges_ns: Float64Column) -> list[str]:
    """Return the tooltip label of each window."""
    return [f"after {duration(second)}" for second in middles(report, edges_ns).tolist()]
