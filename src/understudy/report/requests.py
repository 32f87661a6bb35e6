"""The rows of a report: one JSON line per request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy._core import Tier
from understudy.outputs import create
from understudy.replay.tier_columns import BELOW
from understudy.replay.timeline import NEVER, Status
from understudy.report.latency import NS_PER_MS
from understudy.report.tiers import hits_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from understudy.report.distribution import Float64Column
    from understudy.report.report import Report
    from understudy.workload.columns import Int64Column

CHUNK_ROWS = 50_000  # rows that are Python objects at one time


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """One request. Times are milliseconds on the run's clock; null is "never" or "has none"."""

    request: int
    request_id: str | None
    session: int
    turn: int
    status: str
    reason: str | None
    worker: int | None
    arrival_ms: float
    first_admit_ms: float
    first_token_ms: float
    second_token_ms: float
    last_token_ms: float
    finish_ms: float
    queue_ms: float
    ttft_ms: float
    ttst_ms: float
    tpot_ms: float
    e2e_ms: float
    prompt_tokens: int
    requested_output_tokens: int
    output_tokens: int
    cached_tokens_first: int
    cached_tokens_total: int
    looked_up_tokens: int
    preemptions: int


class TieredRow(RequestRow, frozen=True, gc=False):
    """A request of a run with tiers: where its prompt came from at the first admission, and what it waited for."""

    prompt_from_g1: int
    prompt_from_g2: int
    prompt_from_g3: int
    prompt_from_g4: int
    prompt_computed: int
    parked_ms: float
    room_wait_ms: float


def write_requests(report: Report, path: str | PathLike[str]) -> None:
    """Write a RequestRow per request of `report`, in workload order."""
    encoder = msgspec.json.Encoder()
    with create(path) as file:
        for start in range(0, len(report.columns), CHUNK_ROWS):
            # NaN is written as null.
            file.write(encoder.encode_lines(_rows(report, slice(start, start + CHUNK_ROWS))))


def _rows(report: Report, part: slice) -> Sequence[RequestRow]:
    timeline, latencies = report.columns, report.latencies
    request_ids = timeline.request_ids
    numbers = range(len(timeline))[part]
    names = [status.name.lower() for status in Status]
    columns = (
        numbers,
        request_ids[part] if request_ids is not None else [None] * len(numbers),
        timeline.session[part].tolist(),
        timeline.turn[part].tolist(),
        [names[status] for status in timeline.status[part].tolist()],
        [timeline.reject_reasons.get(row) for row in numbers],
        [worker if worker >= 0 else None for worker in timeline.worker[part].tolist()],
        _ms(timeline.arrival_ns[part]).tolist(),
        _ms(timeline.first_admit_ns[part]).tolist(),
        _ms(timeline.first_token_ns[part]).tolist(),
        _ms(timeline.second_token_ns[part]).tolist(),
        _ms(timeline.last_token_ns[part]).tolist(),
        _ms(timeline.finish_ns[part]).tolist(),
        latencies.queue_ms[part].tolist(),
        latencies.ttft_ms[part].tolist(),
        latencies.ttst_ms[part].tolist(),
        latencies.tpot_ms[part].tolist(),
        latencies.e2e_ms[part].tolist(),
        timeline.prompt_tokens[part].tolist(),
        timeline.requested_output_tokens[part].tolist(),
        timeline.output_tokens[part].tolist(),
        timeline.cached_tokens_first[part].tolist(),
        timeline.cached_tokens_total[part].tolist(),
        timeline.looked_up_tokens[part].tolist(),
        timeline.preemptions[part].tolist(),
    )
    if timeline.tiers is None:
        return list(map(RequestRow, *columns))
    found = [hits_of(timeline, tier, first=True)[part] for tier in (Tier.G1, *BELOW)]
    below = (
        *(tokens.tolist() for tokens in found),
        # What was never admitted was not computed either.
        np.where(
            timeline.first_admit_ns[part] == NEVER, 0, timeline.prompt_tokens[part] - np.sum(found, axis=0)
        ).tolist(),
        (timeline.tiers.parked_ns[part] / NS_PER_MS).tolist(),
        (timeline.tiers.room_wait_ns[part] / NS_PER_MS).tolist(),
    )
    return list(map(TieredRow, *columns, *below))


def _ms(times_ns: Int64Column) -> Float64Column:
    return np.where(times_ns == NEVER, np.nan, times_ns / NS_PER_MS)
