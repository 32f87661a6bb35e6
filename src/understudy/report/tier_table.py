"""The tiers of a run on a terminal, and what they bought."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from understudy.report.text import NONE, duration, fixed, quantity, size

if TYPE_CHECKING:
    from understudy.report.report import Report
    from understudy.report.tiers import LinkUse, TiersReport

COMPARED = (
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
"""What a comparison shows: label, path in the report, unit."""


def tier_rows(tiers: TiersReport, width: int) -> Table:
    """A row a tier; columns that do not fit into `width` are left out."""
    rows = [
        {
            "KV tier": titled(use.tier),
            "hit first": quantity(use.hit_ratio_first, "ratio"),
            "hit all": quantity(use.hit_ratio_total, "ratio"),
            "blocks": f"{use.capacity_blocks:,}",
            "full mean": quantity(use.resident_mean, "ratio"),
            "max": quantity(use.resident_max, "ratio"),
            "end": quantity(use.resident_end, "ratio"),
            "stored": f"{use.stored_blocks:,}",
            "evicted": f"{use.evicted_blocks:,}",
        }
        for use in tiers.tiers
    ]
    return _table(rows, width, expendable=("max", "end", "stored", "blocks", "evicted", "full mean"))


def link_rows(tiers: TiersReport, width: int) -> Table:
    """A row for each kind of link; columns that do not fit into `width` are left out."""
    rows = [
        {
            "Link": arrow(link),
            "GB/s": f"{link.bandwidth_gbps:g}" if math.isfinite(link.bandwidth_gbps) else NONE,
            "transfers": f"{link.transfers:,}",
            "bytes": size(link.bytes),
            "used mean": quantity(link.utilisation_mean, "ratio"),
            "max": quantity(link.utilisation_max, "ratio"),
        }
        for link in limiting(tiers)
    ]
    return _table(rows, width, expendable=("max", "transfers", "GB/s"))


def limiting(tiers: TiersReport) -> list[LinkUse]:
    """All links but those of a worker that say nothing beyond their backend's: unlimited ones in front of it."""
    backends = {link.name.removesuffix("_backend") for link in tiers.links if link.name.endswith("_backend")}
    return [link for link in tiers.links if math.isfinite(link.bandwidth_gbps) or link.name not in backends]


def titled(name: str) -> str:
    """A tier's name for people: the tier in capitals, its pool as it is."""
    pool, _, tier = name.rpartition(" ")
    return f"{pool} {tier.upper()}".lstrip()


def arrow(link: LinkUse) -> str:
    """The link's name for people: G1 → G2, and how many there are."""
    way = link.name.removesuffix("_backend")
    name = titled(way).replace("_TO_", " → ") + (" backend" if link.name != way else "")
    return name if link.links == 1 else f"{name} × {link.links}"


def tier_facts(tiers: TiersReport) -> list[tuple[str, str]]:
    """Headline numbers as label and value."""
    counts = tiers.counts
    facts = [
        ("Onboard, p50 / p99", f"{_ms(tiers.onboard_ms.p50)} / {_ms(tiers.onboard_ms.p99)}"),
        ("Parked, all requests", duration(tiers.parked_s)),
        ("Wait for room", duration(tiers.room_wait_s)),
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


def comparison(report: Report, without: Report, width: int) -> Table:
    """The same workload with and without tiers, and the difference."""
    rows = []
    for label, path, unit in COMPARED:
        now, before = _value(report, path), _value(without, path)
        rows.append(
            {
                "": label if unit in ("ratio", "preemptions", "blocks") else f"{label} ({unit})",
                "with tiers": quantity(now, unit),
                "without": quantity(before, unit),
                "difference": _change(now, before, unit),
            }
        )
    return _table(rows, width, expendable=())


def _change(now: float, before: float, unit: str) -> str:
    if math.isnan(now) or math.isnan(before):
        return NONE
    if unit == "ratio":
        return f"{100 * (now - before):+.1f} points"
    return f"{now / before - 1:+.1%}".replace("%", " %") if before else fixed(now - before)


def _value(report: Report, path: str) -> float:
    value: object = report
    for name in path.split("."):
        value = getattr(value, name)
    assert isinstance(value, int | float)
    return value


def _ms(value: float) -> str:
    return duration(value / 1e3)


def _table(rows: list[dict[str, str]], width: int, expendable: tuple[str, ...]) -> Table:
    """The first column to the left, the others to the right."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + 2 for name in rows[0]}
    for name in expendable:
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
