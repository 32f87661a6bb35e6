"""`Groups`: sums over groups of sessions, from which the noise of a difference between two runs follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.run.bootstrap import divide_sessions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.report.goodput import Slo
    from understudy.run.timeline import Timeline


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over groups of sessions: neighbours in the workload, about as many requests in each.

    Requests of one session depend on each other, and neighbours share a queue; groups are nearly independent. Runs of
    one workload have the same groups, so that their differences can be resampled in pairs.
    """

    requests: list[int]
    completed: list[int]
    good: list[int] | None
    """Requests within the objectives; None without objectives."""
    with_token: list[int]
    """Completed requests with a token: those that have a TTFT."""
    ttft_ms: list[float]
    """Sum of the TTFTs; likewise below."""
    e2e_ms: list[float]
    gaps: list[int]
    """Gaps between tokens of completed requests."""
    gaps_ms: list[float]

    @classmethod
    def of(cls, timeline: Timeline, slo: Slo | None) -> Groups:
        """Sum the requests of a timeline."""
        group = divide_sessions(timeline.session)
        count = int(group.max(initial=-1)) + 1
        done = timeline.completed
        with_token = done & (timeline.output_tokens > 0)
        with_gap = done & (timeline.output_tokens > 1)

        def total(chosen: NDArray[np.bool_], values: NDArray[Any] | None = None) -> NDArray[Any]:
            weights = None if values is None else values[chosen].astype(np.float64)
            return np.bincount(group[chosen], weights, count)

        def sum_ms(chosen: NDArray[np.bool_], start: Any, end: Any) -> list[float]:
            return [round(value, 6) for value in (total(chosen, end - start) / 1e6).tolist()]

        return cls(
            requests=total(np.ones(len(group), np.bool_)).tolist(),
            completed=total(done).tolist(),
            good=None if slo is None else total(slo.met(timeline)).tolist(),
            with_token=total(with_token).tolist(),
            ttft_ms=sum_ms(with_token, timeline.arrival_ns, timeline.first_token_ns),
            e2e_ms=sum_ms(done, timeline.arrival_ns, timeline.served_ns),
            gaps=total(with_gap, timeline.output_tokens - 1).astype(np.int64).tolist(),
            gaps_ms=sum_ms(with_gap, timeline.first_token_ns, timeline.last_token_ns),
        )

    @classmethod
    def read(cls, value: Any) -> Groups:
        """Read the sums of a saved report. InvalidArgument for anything else."""
        try:
            found = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"groups: {error}; write the report again") from None
        columns = [column for column in msgspec.structs.astuple(found) if column is not None]
        if len({len(column) for column in columns}) > 1:
            raise InvalidArgument("groups: the columns differ in length; write the report again")
        if any(not 0 <= value < 1e300 for column in columns for value in column):
            raise InvalidArgument("groups: a sum is negative or too large; write the report again")
        return found
