"""Verdict on hits that windows and states make shorter than those of full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.thresholds import MIN_REQUESTS
from understudy.report.verdict import Verdict, list_pools
from understudy.text import quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData

_LOST = 0.05
"""Share of looked-up tokens."""


def group_tail_gone(report: ReportData) -> Verdict | None:
    """Report that full attention had 5 points more hits, but the tail of a window or a state was gone."""
    found = report.run.kv_groups
    if found is None or report.requests.completed < MIN_REQUESTS:
        return None
    full = found.full_attention_hit_ratio
    if full is None or not full - found.hit_ratio >= _LOST:  # None: no group has full attention
        return None
    kinds = sorted({group.kind for group in found.groups if group.kind not in _FULL})
    hits, alone, cut = (quantity(share, "ratio") for share in (found.hit_ratio, full, found.shortened_ratio))
    keeps_all = all(
        pool.engine.get("prefix_cache_retention_interval", 0) is None for pool in list_pools(report)
    )
    return Verdict(
        "group_tail_gone",
        f"{hits} of the prompt tokens hit, and full attention alone had {alone}: for {cut} of the admissions "
        f"the tail of another KV cache group was gone ({', '.join(kinds)}).",
        f"{'More' if keeps_all else '--prefix-cache-retention-interval none or more'} blocks may help.",
    )


_FULL = ("full_attention", "mla_attention")
