"""Reports: the metrics of a run with their definitions, as an object, table, JSON and HTML page."""

from __future__ import annotations

from understudy.report.counts import KvUsage, PrefixHitRatio, RequestCounts, Throughput, TokenCounts
from understudy.report.goodput import Goodput, Slo
from understudy.report.metric import Metric
from understudy.report.metrics import METRICS
from understudy.report.report import Report
from understudy.report.statistics import PERCENTILE_METHOD, Statistics
from understudy.report.tiers import LinkUse, TierCounts, TiersReport, TierUse

__all__ = [
    "METRICS",
    "PERCENTILE_METHOD",
    "Goodput",
    "KvUsage",
    "LinkUse",
    "Metric",
    "PrefixHitRatio",
    "Report",
    "RequestCounts",
    "Slo",
    "Statistics",
    "Throughput",
    "TierCounts",
    "TierUse",
    "TiersReport",
    "TokenCounts",
]
