"""Counts, rates and shares of a run, each computed from its timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.goodput import ratio
from understudy.report.series import worker_means
from understudy.run.timeline import FinishReason, Status

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by how they ended."""

    total: int
    completed: int
    stopped: int
    length_capped: int
    rejected: int
    cancelled: int
    unfinished: int
    failed: int = 0

    @classmethod
    def of(cls, timeline: Timeline) -> RequestCounts:
        """Count the requests of a run."""
        counts = np.bincount(timeline.status, minlength=len(Status))
        ends = np.bincount(timeline.finish_reason, minlength=len(FinishReason))
        return cls(
            total=len(timeline),
            stopped=int(ends[FinishReason.STOP]),
            length_capped=int(ends[FinishReason.LENGTH]),
            **{status.name.lower(): int(counts[status]) for status in Status},
        )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of completed requests."""

    input: int
    output: int

    @classmethod
    def of(cls, timeline: Timeline) -> TokenCounts:
        """Sum the tokens of a run's completed requests."""
        done = timeline.completed
        return cls(
            input=int(timeline.prompt_tokens[done].sum(dtype=np.int64)),
            output=int(timeline.output_tokens[done].sum(dtype=np.int64)),
        )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over the run's duration; NaN for a run without duration."""

    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float

    @classmethod
    def of(cls, requests: RequestCounts, tokens: TokenCounts, duration_s: float) -> Throughput:
        """Divide the completed requests and their tokens by the duration."""
        return cls(
            requests_per_s=ratio(requests.completed, duration_s),
            input_tokens_per_s=ratio(tokens.input, duration_s),
            output_tokens_per_s=ratio(tokens.output, duration_s),
            total_tokens_per_s=ratio(tokens.input + tokens.output, duration_s),
        )


@dataclass(frozen=True, slots=True)
class PrefixHitRatio:
    """Share of prompt tokens found in the prefix cache; NaN if no request was admitted."""

    first_admission: float
    total: float

    @classmethod
    def of(cls, timeline: Timeline) -> PrefixHitRatio:
        """Divide the cached prompt tokens by those that were looked up."""
        admitted = timeline.first_admit_ns >= 0
        prompt_tokens = timeline.prompt_tokens[admitted].astype(np.int64)
        return cls(
            first_admission=ratio(
                int(timeline.cached_tokens_first[admitted].sum(dtype=np.int64)), int(prompt_tokens.sum())
            ),
            total=ratio(int(timeline.cached_tokens_total.sum()), int(timeline.looked_up_tokens.sum())),
        )


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Usage of the KV cache (shares of capacity), and the blocks stored and evicted."""

    usage_mean: float
    usage_max: float
    cached_mean: float
    stored_blocks: int
    evictions: int
    phantom_hit_blocks: int

    @classmethod
    def of(cls, timeline: Timeline) -> KvUsage:
        """Compute means over time and workers from the samples."""
        used, cached = timeline.sample_used_blocks, timeline.sample_cached_blocks
        used_mean, cached_mean = (float(means.mean()) for means in worker_means(timeline, used, cached))
        blocks = timeline.worker_blocks
        mean = float(blocks.mean())
        return cls(
            usage_mean=used_mean / mean,
            usage_max=float((used / blocks[timeline.sample_worker]).max()) if len(used) else math.nan,
            cached_mean=cached_mean / mean,
            stored_blocks=timeline.stored_blocks,
            evictions=timeline.evictions,
            phantom_hit_blocks=timeline.phantom_hit_blocks,
        )
