"""Prometheus pages: vLLM's names with its labels and buckets, SGLang's, and our own."""

from __future__ import annotations

from understudy.server.metrics.families import Counter, Gauge, Histogram, Registry

__all__ = ["Counter", "Gauge", "Histogram", "Registry"]
