"""General remedies of verdicts, which were not replayed: none that the run already has or would refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.engine_terms import terms_of
from understudy.router.kv import KvRouting

if TYPE_CHECKING:
    from understudy.report.data import ReportData

_KV, _SESSIONS = "by cached prefixes (--routing kv)", "by session (--routing session_affinity)"


def advise_on_scattering(report: ReportData) -> str:
    """Name the routings that keep prefixes together; without any left, fewer workers."""
    ways = [_KV] if allows_kv_routing(report) else []
    if report.run.routing != "session_affinity":
        ways.append(_SESSIONS)
    if not ways:
        return "Use fewer workers with more GPUs each (--tensor-parallel-size)."
    return f"Route {' or '.join(ways)}."


def name_balancing_routing(report: ReportData) -> str:
    """Return a routing by load that the run does not use."""
    if report.run.routing != "least_loaded":
        return "least_loaded"
    return "kv" if allows_kv_routing(report) else "power_of_two"


def name_more_tiers(report: ReportData) -> str | None:
    """Name tiers that would hold more blocks; None if no tier was full."""
    if report.tiers is not None:
        below = (tier for tier in report.tiers.tiers if not tier.tier.endswith("g1"))
        return "larger tiers" if any(tier.evicted_blocks for tier in below) else None
    return "a host tier (--g2)"


def allows_kv_routing(report: ReportData) -> bool:
    """Whether the run has several workers and another routing than kv."""
    return report.columns.num_workers >= 2 and not isinstance(report.run.routing, KvRouting)


def name_more_memory(report: ReportData) -> str:
    """Name a larger cache in the engine's words."""
    return terms_of(report).more_memory
