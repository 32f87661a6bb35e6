"""Print hand-offs between prefill and decode workers on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.report.tier_table import build_table
from understudy.text import NONE, fixed, quantity, size

if TYPE_CHECKING:
    from rich.table import Table

    from understudy.report.handoff import HandOffLink, HandOffReport


def build_handoff_tables(handoff: HandOffReport, width: int) -> list[Table]:
    """Build tables of where the time to the first token went, of the pools and of the links."""
    parts = [
        {
            "TTFT of handed-off requests": name,
            "mean ms": fixed(mean),
            "share": quantity(mean / handoff.ttft_ms if handoff.ttft_ms else 0.0, "ratio"),
        }
        for name, mean in handoff.ttft_parts_ms.items()
    ]
    parts.append({"TTFT of handed-off requests": "together", "mean ms": fixed(handoff.ttft_ms), "share": ""})
    pools = [
        {
            "Pool": f"{pool.role} × {pool.workers}",
            "busy mean": quantity(pool.busy_mean, "ratio"),
            "max": quantity(pool.busy_max, "ratio"),
            "running": fixed(pool.running_mean, 1),
            "KV in use": quantity(pool.kv_usage_mean, "ratio"),
            "kept for others": quantity(pool.held_mean, "ratio") if pool.role == "prefill" else NONE,
            "kept max": quantity(pool.held_max, "ratio") if pool.role == "prefill" else NONE,
        }
        for pool in handoff.pools
    ]
    links = [
        {
            "Link": name_link(link),
            "Bandwidth": f"{link.bandwidth_gbps:g} GB/s" if math.isfinite(link.bandwidth_gbps) else NONE,
            "Bytes": size(link.bytes),
            "Used, mean": quantity(link.utilisation_mean, "ratio"),
            "Used, max": quantity(link.utilisation_max, "ratio"),
            "Used, peak": quantity(link.peak, "ratio"),
            "Busy share": quantity(link.busy, "ratio"),
        }
        for link in handoff.links
    ]
    return [
        build_table(parts, width, dropped_first=()),
        build_table(pools, width, dropped_first=("max", "running", "KV in use")),
        build_table(links, width, dropped_first=("Used, max", "Bytes", "Bandwidth")),
    ]


def list_handoff_facts(handoff: HandOffReport) -> list[tuple[str, str]]:
    """List the numbers of hand-offs: requests by way, bytes and transfer times."""
    took = handoff.transfer_ms
    transfer = f"mean {fixed(took.mean)} ms, p99 {fixed(took.p99)} ms"
    if handoff.remote and took.max == 0:
        transfer = "no time: links have no limit (--kv-link-gbps)"
    facts = [
        ("Hand-offs", f"{handoff.remote:,} requests, {size(handoff.bytes)}"),
        ("Prompt on the decode worker", f"{handoff.local:,} requests, by the rule"),
        ("Transfer", transfer),
        ("Expired leases", f"{handoff.expired_leases:,}"),
    ]
    if handoff.fallback:
        facts.append(
            ("Fallback", f"{handoff.fallback:,} requests, prompt computed again after a failed read")
        )
    if handoff.failed:
        facts.append(("Failed hand-offs", f"{handoff.failed:,} requests"))
    if handoff.late_notifications:
        facts.append(("Late notifications", f"{handoff.late_notifications:,} reads after their lease"))
    return facts


def name_link(link: HandOffLink) -> str:
    """Format the name of a kind of link and the number of links: hand-off, prefill out × 2."""
    return f"hand-off, {link.name}" + (f" × {link.links}" if link.links > 1 else "")
