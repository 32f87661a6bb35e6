"""Explain runs: where each request's latency went, how two runs differ, and traces for Perfetto."""

from understudy.explain.saved_run import SavedRun, read_run
from understudy.explain.waterfall import PARTS, Span, Waterfall, Waterfalls

__all__ = ["PARTS", "SavedRun", "Span", "Waterfall", "Waterfalls", "read_run"]
