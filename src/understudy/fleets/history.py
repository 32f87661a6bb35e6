"""Latencies, throughput and queue of a fleet over the last minutes, with the faults as marks on the time axis."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.metrics.vllm import FIRST_TOKEN_S, GAP_S
from understudy.server.quantiles import FINE_S, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT_ROWS = 300
SUMMARY_ROWS = 60
WINDOW_ROWS = 5
"""Samples that the quantiles and rates of a row cover."""
KEPT_MARKS = 60

FIRST_TOKEN_BOUNDS_S = tuple(sorted({*FIRST_TOKEN_S, *FINE_S}))
GAP_BOUNDS_S = tuple(sorted({*GAP_S, *FINE_S}))
COLUMNS = (
    *("t", "ttft_p50", "ttft_p90", "ttft_p99", "itl_p50", "itl_p90", "itl_p99"),
    *("output_rate", "prompt_rate", "request_rate", "running", "waiting"),
)
"""Columns of a row: Unix time in s, latencies in ms (None: no token), tokens and requests per second, requests."""


class Totals(msgspec.Struct, frozen=True):
    """Counts of all workers since the start, and the requests that are there now."""

    first_tokens: list[int]
    """Requests by time to first token, at `FIRST_TOKEN_BOUNDS_S`."""
    gaps: list[int]
    """Tokens by time since the one before, at `GAP_BOUNDS_S`."""
    output_tokens: float
    prompt_tokens: float
    cached_tokens: float
    running: int
    waiting: int

    @staticmethod
    def sum(parts: Sequence[Totals]) -> Totals:
        """Add the totals of several processes."""
        return Totals(
            [sum(counts) for counts in zip(*(one.first_tokens for one in parts), strict=True)],
            [sum(counts) for counts in zip(*(one.gaps for one in parts), strict=True)],
            *(sum(getattr(one, name) for one in parts) for name in Totals.__struct_fields__[2:]),
        )


class History:
    """A row per sample; the latest rows are kept."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Totals]] = deque(maxlen=SUMMARY_ROWS + 1)
        self.rows: deque[list[float | None]] = deque(maxlen=KEPT_ROWS)
        """Values by `COLUMNS`."""
        self.marks: deque[dict[str, Any]] = deque(maxlen=KEPT_MARKS)
        """Faults that began or ended: `t`, `kind`, `workers`, `ended`."""

    def add(self, now_s: float, totals: Totals) -> None:
        """Add a sample, taken at a Unix time."""
        self._samples.append((now_s, totals))
        window = self._between(WINDOW_ROWS)
        row: list[float | None] = [round(now_s, 1), *window["ttft"], *window["itl"]]
        self.rows.append([*row, *window["rates"], totals.running, totals.waiting])

    def summary(self) -> dict[str, Any]:
        """Return quantiles in ms (p50, p90, p99), tokens per second and the cached share of the last minute."""
        if not self._samples:
            return {"ttft": [None] * 3, "itl": [None] * 3, "rates": [0.0] * 3, "cached": None, "seconds": 0}
        return self._between(SUMMARY_ROWS)

    def _between(self, rows: int) -> dict[str, Any]:
        """Compare the last sample with the one `rows` before it."""
        (end_s, now), index = self._samples[-1], max(len(self._samples) - 1 - rows, 0)
        begin_s, then = self._samples[index]
        passed_s = end_s - begin_s
        prompts = now.prompt_tokens - then.prompt_tokens
        counted = (prompts, now.output_tokens - then.output_tokens)
        first_tokens = _minus(now.first_tokens, then.first_tokens)
        rates = [counted[1], counted[0], sum(first_tokens)]
        return {
            "ttft": quantiles_ms(FIRST_TOKEN_BOUNDS_S, first_tokens),
            "itl": quantiles_ms(GAP_BOUNDS_S, _minus(now.gaps, then.gaps)),
            "rates": [round(count / passed_s, 1) if passed_s > 0 else 0.0 for count in rates],
            "cached": round((now.cached_tokens - then.cached_tokens) / prompts, 4) if prompts else None,
            "seconds": round(passed_s),
        }


def quantiles_ms(bounds: Sequence[float], counts: Sequence[int]) -> list[float | None]:
    """Return p50, p90 and p99 in ms; None without counts."""
    values = (quantile(bounds, counts, share) for share in (0.5, 0.9, 0.99))
    return [None if value is None else float(f"{value * 1e3:.3g}") for value in values]


def _minus(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [after - before for after, before in zip(now, then, strict=True)]
