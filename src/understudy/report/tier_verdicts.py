"""Verdicts on the tiers below the GPU and on their links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.engine_terms import terms_of
from understudy.report.noise import TTFT, is_above_noise
from understudy.report.thresholds import MIN_REQUESTS
from understudy.report.tier_table import format_link
from understudy.report.verdict import Verdict, list_pools
from understudy.text import duration, quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData

_LOWER_TIERS = ("g2", "g3", "g4")


def tier_hurts(report: ReportData) -> Verdict | None:
    """Report that requests waited for offloads, or that the run without tiers was faster."""
    tiers, without = report.tiers, report.without_tiers
    if tiers is None:
        return None
    working_s = report.duration_s * report.columns.num_workers
    terms = terms_of(report)
    modes = {pool.tiers.get("offload", {}).get("mode") for pool in list_pools(report)}
    remedy = terms.write_through_remedy if modes - {None} == {"write_through"} else terms.tier_remedy
    is_slower = without is not None and report.ttft_ms.mean > 1.05 * without.ttft_ms.mean
    if without is not None and is_slower and is_above_noise(report.groups, without.groups, TTFT):
        return Verdict(
            "tier_hurts",
            f"The tiers slow the run down: TTFT is {100 * (report.ttft_ms.mean / without.ttft_ms.mean - 1):+.0f} % "
            f"relative to no tiers; requests waited {duration(tiers.room_wait_s)} for room.",
            remedy,
        )
    if tiers.room_wait_s < 0.05 * working_s or not working_s:
        return None
    return Verdict(
        "tier_hurts",
        f"Offloads block allocations: requests waited {duration(tiers.room_wait_s)} for blocks that were being "
        f"offloaded ({quantity(tiers.room_wait_s / working_s, 'ratio')} of the workers' time).",
        remedy,
    )


def link_at_its_limit(report: ReportData) -> Verdict | None:
    """Report a link that was fully used for at least 20 % of the run."""
    if report.tiers is None:
        return None
    for link in report.tiers.links:
        full = sum(share >= 0.95 for share in link.window_utilisation) / max(len(link.window_utilisation), 1)
        if full >= 0.2:
            return Verdict(
                "link_at_its_limit",
                f"The link {format_link(link)} is at its limit of {link.bandwidth_gbps:g} GB/s for "
                f"{quantity(full, 'ratio')} of the time.",
                terms_of(report).link_remedy,
            )
    return None


def tier_never_read(report: ReportData) -> Verdict | None:
    """Report each tier that blocks were written to and that no request read from."""
    if report.tiers is None or report.requests.completed < MIN_REQUESTS:
        return None
    lower = [tier for tier in report.tiers.tiers if tier.tier.rpartition(" ")[2] in _LOWER_TIERS]
    unread = [tier for tier in lower if tier.stored_blocks and not tier.hit_tokens_total]
    if not unread:
        return None
    names = " and ".join(tier.tier for tier in unread)
    stored = " and ".join(f"{tier.stored_blocks:,}" for tier in unread)
    # Blocks of a lower tier pass through those above it, so only the last tiers can be left out.
    below = lower[lower.index(unread[-1]) + 1 :]
    is_passed = any(tier.hit_tokens_total for tier in below)
    return Verdict(
        "tier_never_read",
        f"No request read from {names}: {stored} blocks were stored, and none was loaded back.",
        "Requests read from a tier below; try a smaller one above it."
        if is_passed
        else "Leave the tier out; the hits stay the same.",
    )


def has_shared_tier(report: ReportData) -> bool:
    """Whether workers share a tier."""
    tiers = [tier for pool in list_pools(report) for tier in pool.tiers.get("tiers", [])]
    return any(tier.get("tier") in ("g3", "g4") for tier in tiers)
