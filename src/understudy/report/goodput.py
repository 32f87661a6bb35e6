"""Goodput: the requests and tokens that were served within the service-level objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import BoolColumn

MAX_LIMIT_MS = 1e12
"""Largest objective, 31 years: in ns it fits into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives of a request; a request must meet all that are set, limits included.

    Errors: ConfigError if none is set, or one is not a positive finite number.
    """

    ttft_ms: float | None = None
    """Time to first token."""
    itl_ms: float | None = None
    """Mean gap between the request's tokens; a request of one token always meets it."""
    e2e_ms: float | None = None
    """Arrival to last token."""

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        if all(limit is None for limit in limits.values()):
            raise ConfigError(f"slo needs at least one of {', '.join(limits)}; give one")
        for name, limit in limits.items():
            if limit is None:
                continue
            number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
            if not (number and math.isfinite(limit) and 0 < limit <= MAX_LIMIT_MS):
                raise ConfigError(
                    f"{name} must be a positive number of milliseconds, at most {MAX_LIMIT_MS:g}, got "
                    f"{f'{limit:g}' if number else repr(limit)}; 2000 is two seconds"
                )

    def met(self, timeline: Timeline) -> BoolColumn:
        """Return which requests completed within the objectives.

        A request without output has no token times: it counts only if e2e_ms is the sole objective.
        """
        good = timeline.completed
        for within in self.within(timeline).values():
            good &= within
        return good

    def within(self, timeline: Timeline) -> dict[str, BoolColumn]:
        """Return which requests meet each objective that is set, by name; meaningless for incomplete requests."""
        tokens = timeline.output_tokens
        within: dict[str, BoolColumn] = {}
        if self.ttft_ms is not None:
            within["ttft_ms"] = (tokens > 0) & (
                timeline.first_token_ns - timeline.arrival_ns <= _ns(self.ttft_ms)
            )
        if self.itl_ms is not None:
            decode_ns = timeline.last_token_ns - timeline.first_token_ns
            within["itl_ms"] = (tokens == 1) | (
                (tokens > 1) & (decode_ns <= _ns(self.itl_ms) * (tokens - 1.0))
            )
        if self.e2e_ms is not None:
            within["e2e_ms"] = timeline.served_ns - timeline.arrival_ns <= _ns(self.e2e_ms)
        return within


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests and tokens served within `slo`. Rates are NaN for a run without duration."""

    slo: Slo
    requests: int
    ratio: float
    requests_per_s: float
    output_tokens_per_s: float

    @classmethod
    def of(cls, timeline: Timeline, slo: Slo, duration_s: float) -> Goodput:
        """Count the requests that met `slo` over a run of `duration_s`."""
        good = slo.met(timeline)
        requests = int(good.sum())
        tokens = int(timeline.output_tokens[good].sum())
        return cls(
            slo=slo,
            requests=requests,
            ratio=ratio(requests, len(timeline)),
            requests_per_s=ratio(requests, duration_s),
            output_tokens_per_s=ratio(tokens, duration_s),
        )


def ratio(part: float, whole: float) -> float:
    """Return part / whole; NaN if whole is 0."""
    return part / whole if whole else math.nan


def _ns(limit_ms: float) -> int:
    # Rounded, so that a limit such as 33.3 ms, which has no exact double, includes its boundary.
    return round(limit_ms * 1e6)
