"""Print the tiers and links of a run on a terminal, and the comparison with the run without tiers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from understudy.text import NONE, UNLIMITED, duration, fixed, quantity, size

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.tiers import LinkUse, TiersReport

COMPARED = (
    ("SLO attainment", "goodput.ratio", "ratio"),
    ("TTFT, mean", "ttft_ms.mean", "ms"),
    ("TTFT, p99", "ttft_ms.p99", "ms"),
    ("ITL, mean", "itl_ms.mean", "ms"),
    ("E2E, mean", "e2e_ms.mean", "ms"),
    ("E2E, p99", "e2e_ms.p99", "ms"),
    ("Prefix hit, first", "prefix_hit_ratio.first_admission", "ratio"),
    ("Prefix hit, all", "prefix_hit_ratio.total", "ratio"),
    ("Output throughput", "throughput.output_tokens_per_s", "tok/s"),
    ("Duration", "duration_s", "s"),
    ("Preemptions", "preemptions", "preemptions"),
    ("Evicted blocks", "kv.evictions", "blocks"),
)
"""Rows of a comparison: label, path in the report, unit."""


def build_tier_table(tiers: TiersReport, width: int) -> Table:
    """Build a table with one row per tier; drop columns to fit `width`."""
    rows = [
        {
            "KV tier": format_tier(use.tier),
            "Hit, first": quantity(use.hit_ratio_first, "ratio"),
            "Hit, all": quantity(use.hit_ratio_total, "ratio"),
            "Blocks": UNLIMITED if use.capacity_blocks is None else f"{use.capacity_blocks:,}",
            "Full, mean": quantity(use.resident_mean, "ratio"),
            "Full, max": quantity(use.resident_max, "ratio"),
            "Full, end": quantity(use.resident_end, "ratio"),
            "Stored": f"{use.stored_blocks:,}",
            "Evicted": f"{use.evicted_blocks:,}",
        }
        for use in tiers.tiers
    ]
    return build_table(
        rows, width, dropped_first=("Full, max", "Full, end", "Stored", "Blocks", "Evicted", "Full, mean")
    )


def build_link_table(tiers: TiersReport, width: int) -> Table:
    """Build a table with one row per kind of link; drop columns to fit `width`."""
    rows = [
        {
            "Link": format_link(link),
            "Bandwidth": f"{link.bandwidth_gbps:g} GB/s" if math.isfinite(link.bandwidth_gbps) else NONE,
            "Transfers": f"{link.transfers:,}",
            "Bytes": size(link.bytes),
            "Used, mean": quantity(link.utilisation_mean, "ratio"),
            "Used, max": quantity(link.utilisation_max, "ratio"),
        }
        for link in list_limiting_links(tiers)
    ]
    return build_table(rows, width, dropped_first=("Used, max", "Transfers", "Bandwidth"))


def list_limiting_links(tiers: TiersReport) -> list[LinkUse]:
    """Return all links except unlimited worker links in front of a backend link."""
    backends = {link.name.removesuffix("_backend") for link in tiers.links if link.name.endswith("_backend")}
    return [link for link in tiers.links if math.isfinite(link.bandwidth_gbps) or link.name not in backends]


def format_tier(name: str) -> str:
    """Format the name of a tier: the tier in capitals, its pool unchanged."""
    pool, _, tier = name.rpartition(" ")
    return f"{pool} {tier.upper()}".lstrip()


def format_link(link: LinkUse) -> str:
    """Format the name of a link and the number of links: G1 → G2 × 4."""
    ends = link.name.removesuffix("_backend")
    name = format_tier(ends).replace("_TO_", " → ") + (" backend" if link.name != ends else "")
    return name if link.links == 1 else f"{name} × {link.links}"


def list_tier_facts(tiers: TiersReport) -> list[tuple[str, str]]:
    """Return the main numbers of tiers as labels and values."""
    counts = tiers.counts
    facts = [
        ("Onboard latency, p50 / p99", f"{_ms(tiers.onboard_ms.p50)} / {_ms(tiers.onboard_ms.p99)}"),
        ("Parked, all requests", duration(tiers.parked_s)),
        ("Wait for room, all requests", duration(tiers.room_wait_s)),
        ("Offloaded blocks", f"{counts.offloaded_blocks:,}"),
        ("Onboarded blocks", f"{counts.onboarded_blocks:,} in {counts.onboards:,} loads"),
    ]
    for label, name in (
        ("Dropped blocks", "dropped_blocks"),
        ("Joined blocks", "joined_loads"),
        ("Slow loads", "slow_loads"),
        ("Failed loads", "failed_loads"),
        ("Deferred lookups", "deferred_lookups"),
        ("Refused stores", "refused_stores"),
        ("Flushed copies", "flushed_copies"),
    ):
        if value := getattr(counts, name):
            facts.append((label, f"{value:,}"))
    return facts


def build_comparison(report: ReportData, without: ReportData, width: int) -> Table:
    """Build a table of metrics with and without tiers, and their difference."""
    rows = []
    for label, path, unit in COMPARED:
        if path.startswith("goodput.") and report.goodput is None:
            continue  # a run without goals
        now, before = _value(report, path), _value(without, path)
        rows.append(
            {
                "": label if unit in ("ratio", "preemptions", "blocks") else f"{label} ({unit})",
                "with tiers": quantity(now, unit),
                "without": quantity(before, unit),
                "difference": _change(now, before, unit),
            }
        )
    return build_table(rows, width, dropped_first=())


def _change(now: float, before: float, unit: str) -> str:
    if math.isnan(now) or math.isnan(before):
        return NONE
    if unit == "ratio":
        return f"{100 * (now - before):+.1f} points"
    return f"{now / before - 1:+.1%}".replace("%", " %") if before else fixed(now - before)


def _value(report: ReportData, path: str) -> float:
    value: object = report
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, int | float)
    return value


def _ms(value: float) -> str:
    return duration(value / 1e3)


def build_table(rows: list[dict[str, str]], width: int, dropped_first: tuple[str, ...]) -> Table:
    """Build a table whose first column is left-aligned, the others right-aligned."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + 2 for name in rows[0]}
    for name in dropped_first:
        if sum(widths.values()) > width:
            del widths[name]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
    for at, name in enumerate(widths):
        table.add_column(
            name, justify="right" if at else "left", style=None if at else "cyan", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(row[name]) for name in widths))
    return table
