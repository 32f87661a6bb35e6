"""Results of one load against an endpoint: counts, latencies, throughput, and lines per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.report.goodput import Slo  # noqa: TC001  (annotations of a public class)
from understudy.report.statistics import Statistics

if TYPE_CHECKING:
    from understudy.online.completions import EndpointRun
    from understudy.workload import Workload

SCHEMA = "understudy.load/1"
LATE_MS = 20.0
"""Lateness of this machine (p99) from which its times are not the endpoint's."""
NAMES = ("count", "mean", "p50", "p90", "p99", "max")
"""Statistics in JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """What a client saw of one load. Times are in ms; statistics are of answered requests."""

    label: str
    """The load in words, such as `2 requests/s`."""
    level: float | None
    """Requests per second, or users; None for a trace's own times."""
    requests: int
    failed: int
    first_error: str | None
    duration_s: float
    """First request to the last end."""
    ttft_ms: Statistics
    tpot_ms: Statistics
    e2e_ms: Statistics
    late_ms: Statistics
    """How long after its time this machine sent each request."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """As the endpoint reports them; None if it does not."""
    reported: int
    """Requests whose tokens the endpoint counted; of the others, prompts have those sent, answers their chunks."""
    in_time: float | None
    """Share of requests within the objectives; None without any."""
    early_ttft_ms: float
    """Median TTFT of the first quarter of the requests."""
    late_ttft_ms: float
    """The same of the last quarter: much larger if a queue grows."""
    rows: list[dict[str, Any]] = field(repr=False)
    """A line per request, as `calibrate` reads them."""

    @classmethod
    def of(
        cls, workload: Workload, run: EndpointRun, label: str, level: float | None, slo: Slo | None
    ) -> LoadResult:
        """Summarise a run. Failed requests have no times, and count as late."""
        answered = run.first_token_ns >= 0
        answered[list(run.errors)] = False
        reported = run.output_tokens >= 0
        prompts = np.where(run.prompt_tokens >= 0, run.prompt_tokens, workload.prompt_tokens).astype(np.int64)
        outputs = np.where(reported, run.output_tokens, run.chunks).astype(np.int64)
        ttft = (run.first_token_ns - run.arrival_ns) / 1e6
        e2e = (run.last_token_ns - run.arrival_ns) / 1e6
        several = answered & (outputs > 1)
        tpot = np.full(len(ttft), np.nan)
        tpot[several] = (run.last_token_ns - run.first_token_ns)[several] / 1e6 / (outputs[several] - 1)
        sent = np.flatnonzero(answered)
        order = sent[np.argsort(run.arrival_ns[sent], kind="stable")]
        quarter = max(len(order) // 4, 1)
        cached = run.cached_tokens[answered]
        return cls(
            label=label,
            level=level,
            requests=len(ttft),
            failed=int((~answered).sum()),
            first_error=next(iter(run.errors.values()), None),
            duration_s=float(run.finish_ns.max(initial=0) - max(run.arrival_ns.min(initial=2**62), 0)) / 1e9
            if len(ttft)
            else 0.0,
            ttft_ms=Statistics.of(ttft[answered]),
            tpot_ms=Statistics.of(tpot[several]),
            e2e_ms=Statistics.of(e2e[answered]),
            late_ms=Statistics.of((run.arrival_ns - run.due_ns)[run.arrival_ns >= 0] / 1e6),
            prompt_tokens=int(prompts[answered].sum()),
            output_tokens=int(outputs[answered].sum()),
            cached_tokens=int(cached.sum()) if len(cached) and (cached >= 0).all() else None,
            reported=int((reported & answered).sum()),
            in_time=None if slo is None else _share_in_time(slo, answered, ttft, tpot, e2e),
            early_ttft_ms=float(np.median(ttft[order[:quarter]])) if len(order) else float("nan"),
            late_ttft_ms=float(np.median(ttft[order[-quarter:]])) if len(order) else float("nan"),
            rows=[
                {
                    "request_id": f"row-{row}",
                    "status": "completed",
                    "arrival_ms": float(run.arrival_ns[row] / 1e6),
                    "ttft_ms": float(ttft[row]),
                    "tpot_ms": None if np.isnan(tpot[row]) else float(tpot[row]),
                    "e2e_ms": float(e2e[row]),
                    "prompt_tokens": int(prompts[row]),
                    "output_tokens": int(outputs[row]),
                    "counted_by_endpoint": bool(reported[row]),
                    **(
                        {"cached_tokens_first": int(run.cached_tokens[row])}
                        if run.cached_tokens[row] >= 0
                        else {}
                    ),
                }
                for row in order.tolist()
            ],
        )

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second of the whole load, its end included."""
        return (self.requests - self.failed) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of the whole load."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the lines per request."""
        statistics = {
            name: {one: _number(getattr(getattr(self, name), one)) for one in NAMES}
            for name in ("ttft_ms", "tpot_ms", "e2e_ms", "late_ms")
        }
        return {
            "load": self.label,
            "level": self.level,
            "requests": self.requests,
            "failed": self.failed,
            "first_error": self.first_error,
            "duration_s": self.duration_s,
            **statistics,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "counted_by_endpoint": self.reported,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "in_time": self.in_time,
        }

    def notes(self) -> list[str]:
        """Return what makes these numbers less than they seem."""
        notes = []
        if self.first_error is not None:
            notes.append(
                f"{self.label}: {self.failed:,} of {self.requests:,} requests failed; the first: {self.first_error}"
            )
        answered = self.requests - self.failed
        if self.reported < answered:
            notes.append(
                f"{self.label}: the endpoint counted the tokens of {self.reported:,} of {answered:,} answers; of the "
                "others, prompts have the tokens sent, and answers their chunks"
            )
        if self.late_ms.count and self.late_ms.p99 > LATE_MS:
            notes.append(
                f"{self.label}: this machine sent requests late (p99 {self.late_ms.p99:,.0f} ms): it is the limit, not "
                "the endpoint; use a larger one, or a lower load"
            )
        if self.cached_tokens:
            notes.append(
                f"{self.label}: {self.cached_tokens:,} prompt tokens were cached; calibrate reads runs without hits "
                "only"
            )
        return notes


def _share_in_time(slo: Slo, answered: Any, ttft: Any, tpot: Any, e2e: Any) -> float:
    good = answered.copy()
    if slo.ttft_ms is not None:
        good &= ttft <= slo.ttft_ms
    if slo.itl_ms is not None:
        good &= np.isnan(tpot) | (tpot <= slo.itl_ms)
    if slo.e2e_ms is not None:
        good &= e2e <= slo.e2e_ms
    return float(good.mean()) if len(good) else 0.0


def _number(value: float) -> float | None:
    return None if value != value else value
