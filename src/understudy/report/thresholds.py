"""Thresholds that several rules of verdicts share."""

from __future__ import annotations

MIN_REQUESTS = 20
"""Fewer requests are too few for shares."""
KV_FULL = 0.95
"""KV usage from which requests may wait for blocks."""
LONG_QUEUE = 0.1
"""Share of the E2E time in queues that is a finding: runs with room to spare spend a few percent there or less."""
