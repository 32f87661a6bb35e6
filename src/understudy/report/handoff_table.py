"""Print hand-offs between prefill and decode workers on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from understudy.report.text import fixed, quantity, size

if TYPE_CHECKING:
    from understudy.report.handoff import HandOffReport


def build_handoff_table(handoff: HandOffReport) -> Table:
    """Build a table of where the time to the first token went, with the hand-offs below."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    table.add_column("TTFT of handed-off requests")
    table.add_column("mean ms", justify="right")
    table.add_column("share", justify="right")
    for name, mean in handoff.ttft_parts_ms.items():
        share = mean / handoff.ttft_ms if handoff.ttft_ms else 0.0
        table.add_row(name, fixed(mean), quantity(share, "ratio"))
    table.add_row(Text("together", style="bold"), fixed(handoff.ttft_ms), "")
    return table


def list_handoff_facts(handoff: HandOffReport) -> list[tuple[str, str]]:
    """List the numbers of hand-offs: requests by way, bytes, transfer times, and blocks that are kept."""
    facts = [
        ("Hand-offs", f"{handoff.remote:,} requests, {size(handoff.bytes)}"),
        ("Prompt on the decode worker", f"{handoff.local:,} requests, by the rule"),
        ("Transfer", f"mean {fixed(handoff.transfer_ms.mean)} ms, p99 {fixed(handoff.transfer_ms.p99)} ms"),
    ]
    for pool in handoff.pools:
        held = f"; kept for others mean {quantity(pool.held_mean, 'ratio')}, max {quantity(pool.held_max, 'ratio')}"
        facts.append(
            (
                f"{pool.role.capitalize()} pool",
                f"{pool.workers} workers, KV in use {quantity(pool.kv_usage_mean, 'ratio')}"
                + (held if pool.role == "prefill" else ""),
            )
        )
    return facts
