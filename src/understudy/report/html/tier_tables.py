"""Build the page's tables of tiers and links."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from understudy.report.metrics import BY_KEY, STATISTICS
from understudy.report.tier_metrics import TIER_DISTRIBUTIONS, TIER_SCALARS
from understudy.report.tier_table import format_link, format_tier, list_limiting_links
from understudy.text import NONE, UNLIMITED, fixed, quantity, size

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.metric import Metric

TIER_COLUMNS = {
    "hit_ratio_first": "Hit, first",
    "hit_tokens_first": "Hit tokens, first",
    "hit_ratio_total": "Hit, all",
    "hit_tokens_total": "Hit tokens, all",
    "capacity_blocks": "Blocks",
    "resident_mean": "Full, mean",
    "resident_max": "Full, max",
    "resident_end": "Full, end",
    "stored_blocks": "Stored",
    "evicted_blocks": "Evicted",
}
LINK_COLUMNS = {
    "bandwidth_gbps": "Bandwidth",
    "transfers": "Transfers",
    "bytes": "Bytes",
    "busy_s": "Busy",
    "utilisation_mean": "Used, mean",
    "utilisation_max": "Used, max",
}
"""Columns of a table: field and heading."""


def tier_tables(report: ReportData) -> str:
    """Build one card with tiers, links, latencies and counts; empty for a run without tiers."""
    tiers = report.tiers
    if tiers is None:
        return ""
    by_tier = build_table(
        "Tier", "tiers.tiers[].", TIER_COLUMNS, [(format_tier(use.tier), use) for use in tiers.tiers]
    )
    by_link = build_table(
        "Link",
        "tiers.links[].",
        LINK_COLUMNS,
        [(format_link(link), link) for link in list_limiting_links(tiers)],
    )
    numbers = []
    for metric in TIER_SCALARS:
        value: Any = report
        for name in metric.key.split("."):
            value = getattr(value, name)
        unit = "" if metric.unit == "ratio" else f' <span class="unit">{metric.unit}</span>'
        numbers.append(f"<div>{_named(metric)}<span>{quantity(value, metric.unit)}{unit}</span></div>")
    return (
        '<section class="card full"><div class="head"><h2>KV tiers</h2><span class="sub">hover over a name for its '
        f"definition</span></div>{by_tier}{by_link}{_latencies(report)}"
        f'<div class="columns">{"".join(numbers)}</div></section>'
    )


def build_table(first: str, prefix: str, columns: dict[str, str], rows: list[tuple[str, Any]]) -> str:
    """Build a table of numbers whose definitions are under `prefix`, one row per name and record."""
    metrics = [BY_KEY[prefix + field] for field in columns]
    head = "".join(
        f"<th>{_named(metric, label)}</th>" for metric, label in zip(metrics, columns.values(), strict=True)
    )
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_cell(getattr(row, c), m)}</td>" for c, m in zip(columns, metrics, strict=True))
        + "</tr>"
        for name, row in rows
    )
    return _scroll(f"<thead><tr><th>{first}</th>{head}</tr></thead><tbody>{body}</tbody>")


def _latencies(report: ReportData) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("count", *STATISTICS))
    rows = []
    for metric in TIER_DISTRIBUTIONS:
        values = getattr(report.tiers, metric.key.rpartition(".")[2])
        cells = f"<td>{values.count:,}</td>"
        cells += "".join(f"<td>{fixed(getattr(values, field))}</td>" for field in STATISTICS.values())
        rows.append(f'<tr><td>{_named(metric)} <span class="unit">{metric.unit}</span></td>{cells}</tr>')
    return _scroll(f"<thead><tr><th>Latency</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>")


def _cell(value: float | None, metric: Metric) -> str:
    if value is None:
        return UNLIMITED
    if metric.unit == "bytes":
        return size(value)
    if metric.unit == "GB/s":
        return f"{value:g} GB/s" if math.isfinite(value) else UNLIMITED
    if metric.unit == "s":
        return NONE if math.isnan(value) else f"{fixed(value)} s"
    return quantity(value, metric.unit)


def _named(metric: Metric, label: str | None = None) -> str:
    return f'<span data-tip="{escape(metric.definition)}" tabindex="0">{escape(label or metric.name)}</span>'


def _scroll(table: str) -> str:
    return f'<div class="scroll" style="margin-bottom:16px"><table>{table}</table></div>'
