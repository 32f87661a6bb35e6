"""Verdicts on prefill and decode workers: which side, or which link, delays the first token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.report.engine_terms import kind_of_run
from understudy.report.thresholds import MIN_REQUESTS
from understudy.report.verdict import Verdict
from understudy.text import fixed, quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.handoff import HandOffLink, HandOffReport

SIDES = {
    "prefill queue": (
        "Prefill workers are the bottleneck",
        "Use more prefill workers, added or instead of decode workers.",
    ),
    "decode queue": (
        "Decode workers are the bottleneck",
        "Use more decode workers, added or instead of prefill workers.",
    ),
    "polls": (
        "The decode workers' steps are the bottleneck",
        "Use shorter steps on decode workers (fewer --max-num-batched-tokens), or more of them.",
    ),
}
LARGE_PART = 0.3
"""Share of the mean TTFT from which a wait is a bottleneck."""
MANY_FAILURES = 0.05
"""Share of the hand-offs from which failures are a problem."""
BUSY = 0.9
"""Share of the duration from which a link is a bottleneck."""


def handoff_bottleneck(report: ReportData) -> Verdict | None:
    """Report the wait on a side that takes 30 % of the time to the first token, unless transfers take more."""
    part = _find_largest_wait(report)
    if part is None or report.handoff is None:
        return None
    finding, remedy = SIDES[part]
    return Verdict("handoff_bottleneck", f"{finding}: {_describe_part(report.handoff, part)}.", remedy)


def find_bottleneck_side(report: ReportData) -> str | None:
    """Return the role whose workers are the bottleneck; None if there is no such verdict."""
    part = _find_largest_wait(report)
    return None if part is None else "prefill" if part == "prefill queue" else "decode"


def _find_largest_wait(report: ReportData) -> str | None:
    """Return the wait on a side that is the bottleneck, a key of `SIDES`."""
    handoff = report.handoff
    if handoff is None or handoff.remote < MIN_REQUESTS:
        return None
    waits = {name: handoff.ttft_parts_ms[name] for name in (*SIDES, "transfer")}
    part = max(waits, key=lambda name: waits[name])
    share = waits[part] / handoff.ttft_ms if handoff.ttft_ms else 0.0
    return None if share < LARGE_PART or part == "transfer" else part


def handoff_link(report: ReportData) -> Verdict | None:
    """Report a link that is busy 90 % of the time, or transfers that take 30 % of the time to the first token."""
    handoff = report.handoff
    if handoff is None or handoff.remote < MIN_REQUESTS:
        return None
    link = busiest_link(handoff)
    share = handoff.ttft_parts_ms["transfer"] / handoff.ttft_ms if handoff.ttft_ms else 0.0
    if link is None:
        if share < LARGE_PART:
            return None
        finding = f"The latency of links is the bottleneck: {_describe_part(handoff, 'transfer')}."
        return Verdict("handoff_link", finding, "Lower it (--kv-link-latency-ms).")
    if not (link.busy >= BUSY or share >= LARGE_PART):
        return None
    flag = name_flag(link)
    return Verdict(
        "handoff_link",
        f"The hand-offs' link is the bottleneck: {flag} {link.bandwidth_gbps:g} ({link.name}) is busy "
        f"{quantity(link.busy, 'ratio')} of the time, and {_describe_part(handoff, 'transfer')}.",
        f"Use a faster link ({flag}), or {_name_fewer_bytes(report)}.",
    )


def handoff_failures(report: ReportData) -> Verdict | None:
    """Report that 5 % of the hand-offs failed, or 5 % of them read blocks whose lease had expired."""
    handoff = report.handoff
    if handoff is None:
        return None
    lost = handoff.fallback + handoff.failed
    reads = handoff.remote + lost
    if reads < MIN_REQUESTS:
        return None
    if lost >= MANY_FAILURES * reads:
        return Verdict(
            "handoff_failures",
            f"{lost:,} of {reads:,} hand-offs failed ({quantity(lost / reads, 'ratio')}): decode workers computed "
            f"{handoff.fallback:,} prompts again, and {handoff.failed:,} requests ended.",
            _repair_transfers(report, handoff),
        )
    if handoff.late_notifications >= MANY_FAILURES * reads:
        return Verdict(
            "handoff_failures",
            f"{handoff.late_notifications:,} of {reads:,} hand-offs read blocks after the end of their lease "
            f"({quantity(handoff.late_notifications / reads, 'ratio')}); vLLM does not notice it, and the blocks may "
            "have been overwritten.",
            "Use a longer lease (--kv-lease-duration), or a shorter way to the decode worker (--hand-off-hop-ms).",
        )
    return None


def _name_fewer_bytes(report: ReportData) -> str:
    if kind_of_run(report).pulls_blocks:
        return "hand off fewer prompts (--disaggregation uncached:2048)"
    return "send less (--disaggregation-decode-enable-radix-cache)"


def _repair_transfers(report: ReportData, handoff: HandOffReport) -> str:
    if not kind_of_run(report).pulls_blocks:
        return "Repair the transfers; decode workers keep the pages of each failed one until nothing writes to them."
    if handoff.fallback:
        return (
            "Repair the transfers; prefill workers keep the blocks of each failed one until its lease ends."
        )
    return "Repair the transfers, or compute the prompts again (--kv-load-failure-policy recompute)."


def busiest_link(handoff: HandOffReport) -> HandOffLink | None:
    """Return the link with a limit that uses most of its bandwidth; None if no link has a limit."""
    limited = [link for link in handoff.links if math.isfinite(link.bandwidth_gbps)]
    return max(limited, key=lambda link: link.utilisation_max, default=None)


def name_flag(link: HandOffLink) -> str:
    """Return the flag that sets the bandwidth of a link."""
    return "--kv-link-backend-gbps" if link.name == "backend" else "--kv-link-gbps"


def _describe_part(handoff: HandOffReport, part: str) -> str:
    took = handoff.ttft_parts_ms[part]
    verb = "take" if part == "polls" else "takes"
    return (
        f"{part} {verb} {fixed(took)} ms of a mean TTFT of {fixed(handoff.ttft_ms)} ms "
        f"({quantity(took / handoff.ttft_ms, 'ratio')})"
    )
