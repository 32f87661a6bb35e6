"""Reports: exact metrics of a run with their definitions, as a typed object, table, JSON and HTML page."""

from __future__ import annotations

from understudy.report.distribution import PERCENTILE_METHOD, Distribution
from understudy.report.goodput import Goodput, Slo
from understudy.report.metrics import METRICS, Metric
from understudy.report.report import KvUsage, PrefixHitRatio, Report, RequestCounts, Throughput, TokenCounts

__all__ = [
    "METRICS",
    "PERCENTILE_METHOD",
    "Distribution",
    "Goodput",
    "KvUsage",
    "Metric",
    "PrefixHitRatio",
    "Report",
    "RequestCounts",
    "Slo",
    "Throughput",
    "TokenCounts",
]
