"""Split the latency of each request into phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.latency import NS_PER_MS

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column

NAMES = {
    "queue_ms": "queue",
    "room_ms": "waiting for room",
    "parked_ms": "parked on a load",
    "prefill_ms": "prefill",
    "decode_ms": "decode",
}


@dataclass(frozen=True, eq=False, slots=True)
class Phases:
    """Phases of completed requests with at least one token; waits after a preemption count as decode."""

    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Row numbers of these requests."""
    queue_ms: Float64Column
    room_ms: Float64Column
    parked_ms: Float64Column
    prefill_ms: Float64Column
    decode_ms: Float64Column

    @classmethod
    def of(cls, report: ReportData) -> Phases:
        """Split the latencies of a report's requests."""
        t = report.columns
        rows = np.flatnonzero(t.completed & (t.output_tokens > 0))
        wait = (t.first_admit_ns - t.arrival_ns)[rows]
        none = np.zeros(len(rows), np.int64)
        room = np.minimum(none if t.tiers is None else t.tiers.room_wait_ns[rows], wait)
        parked = np.minimum(none if t.tiers is None else t.tiers.parked_ns[rows], wait - room)
        return cls(
            rows=rows,
            queue_ms=(wait - room - parked) / NS_PER_MS,
            room_ms=room / NS_PER_MS,
            parked_ms=parked / NS_PER_MS,
            prefill_ms=(t.first_token_ns - t.first_admit_ns)[rows] / NS_PER_MS,
            decode_ms=(t.last_token_ns - t.first_token_ns)[rows] / NS_PER_MS,
        )

    @property
    def total_ms(self) -> Float64Column:
        """Sum of the phases per request: its latency."""
        total: Float64Column = np.sum([getattr(self, name) for name in NAMES], axis=0)
        return total

    def means(
        self, rows: np.ndarray[tuple[int], np.dtype[np.int64]] | slice = slice(None)
    ) -> dict[str, float]:
        """Return the mean of each phase over `rows`."""
        return {name: float(getattr(self, name)[rows].mean()) for name in NAMES}

    def slowest(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the rows of the slowest percent, at least one."""
        total = self.total_ms
        return np.argsort(-total, kind="stable")[: max(1, len(total) // 100)]
