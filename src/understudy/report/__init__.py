"""Reports: exact metrics of a run with their definitions, as a typed object, table, JSON and HTML page."""

from __future__ import annotations

from understudy.report.distribution import PERCENTILE_METHOD, Distribution
from understudy.report.goodput import Goodput, Slo
from understudy.report.metrics import METRICS, Metric
from understudy.report.report import KvUsage, PrefixHitRatio, Report, RequestCounts, Throughput, TokenCounts
from understudy.report.tiers import LinkUse, TierCounts, TiersReport, TierUse

__all__ = [
    "METRICS",
    "PERCENTILE_METHOD",
    "Distribution",
    "Goodput",
    "KvUsage",
    "LinkUse",
    "Metric",
    "PrefixHitRatio",
    "Report",
    "RequestCounts",
    "Slo",
    "Throughput",
    "TierCounts",
    "TierUse",
    "TiersReport",
    "TokenCounts",
]
