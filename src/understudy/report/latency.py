"""Compute the latencies of each request from the timeline, for the report, its rows and its plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.run.schema import NEVER

if TYPE_CHECKING:
    from understudy.report.statistics import Float64Column
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import BoolColumn, Int64Column

NS_PER_MS = 1e6
NS_PER_S = 1e9


@dataclass(frozen=True, eq=False, slots=True)
class Latencies:
    """Latencies with one row per request; NaN if a request has no such latency or did not complete."""

    queue_ms: Float64Column
    ttft_ms: Float64Column
    ttft_queued_ms: Float64Column
    ttst_ms: Float64Column
    tpot_ms: Float64Column
    e2e_ms: Float64Column

    @classmethod
    def of(cls, timeline: Timeline) -> Latencies:
        """Compute all latencies of a timeline."""
        done = timeline.completed
        one_token = done & (timeline.output_tokens > 0)
        two_tokens = done & (timeline.output_tokens > 1)
        decode_ms = _compute_gap_ms(timeline.first_token_ns, timeline.last_token_ns, two_tokens)
        admitted = done & (timeline.first_admit_ns != NEVER)
        return cls(
            queue_ms=_compute_gap_ms(timeline.arrival_ns, timeline.first_admit_ns, admitted),
            ttft_ms=_compute_gap_ms(timeline.arrival_ns, timeline.first_token_ns, one_token),
            ttft_queued_ms=_compute_gap_ms(timeline.queued_ns, timeline.first_token_ns, one_token),
            ttst_ms=_compute_gap_ms(timeline.first_token_ns, timeline.second_token_ns, two_tokens),
            tpot_ms=decode_ms / np.maximum(timeline.output_tokens - 1, 1),
            e2e_ms=_compute_gap_ms(timeline.arrival_ns, timeline.served_ns, done),
        )


def _compute_gap_ms(start_ns: Int64Column, end_ns: Int64Column, valid: BoolColumn) -> Float64Column:
    return np.where(valid, (end_ns - start_ns) / NS_PER_MS, np.nan)


def present(values: Float64Column) -> Float64Column:
    """Return the values that are not NaN."""
    return values[~np.isnan(values)]
