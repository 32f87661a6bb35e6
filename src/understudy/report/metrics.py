"""Names, units and definitions of all metrics of a report.

Tables, JSON, the HTML page and docs/metrics.md use these texts; those of tiers are in `tier_metrics`.
"""

from __future__ import annotations

from understudy.report.handoff_metrics import HANDOFF_METRICS
from understudy.report.metric import Metric
from understudy.report.tier_metrics import TIER_METRICS

DISTRIBUTIONS = (
    Metric(
        "ttft_ms",
        "Time to first token (TTFT)",
        "ms",
        "First output token − arrival, per request with at least one token.",
    ),
    Metric(
        "ttft_queued_ms",
        "TTFT from queue",
        "ms",
        "First output token − when the engine read the request (at once if idle, else at the end of the current step), "
        "per request with at least one token.",
    ),
    Metric(
        "ttst_ms",
        "Time to second token (TTST)",
        "ms",
        "Second output token − first output token, per request with at least two tokens; 0 if both came in one "
        "speculative burst.",
    ),
    Metric(
        "itl_ms",
        "Inter-token latency (ITL)",
        "ms",
        "Every gap between consecutive output tokens, pooled over all requests; tokens of one speculative burst have "
        "gaps of 0 between them.",
    ),
    Metric(
        "tpot_ms",
        "Time per output token (TPOT)",
        "ms",
        "(Last token − first token) ÷ (output tokens − 1), per request with at least two tokens.",
    ),
    Metric(
        "e2e_ms",
        "Request latency (E2E)",
        "ms",
        "Last output token − arrival, per request; completion − arrival for a request without output.",
    ),
    Metric("queue_ms", "Queue time", "ms", "Start of the step that first scheduled the request − arrival."),
    Metric(
        "output_tokens_per_s_per_user",
        "Output token throughput per user",
        "tokens/s",
        "1 ÷ TPOT of each request whose tokens did not all come at once.",
    ),
    Metric("prompt_tokens", "Input sequence length", "tokens", "Prompt tokens per request."),
    Metric("output_tokens", "Output sequence length", "tokens", "Emitted tokens per request."),
)
"""Each is `Statistics` over completed requests."""

SCALARS = (
    Metric(
        "duration_s",
        "Duration",
        "s",
        "First arrival to the last token of any request; to the last completion if no token was emitted.",
    ),
    Metric("requests.total", "Requests", "requests", "All requests of the workload."),
    Metric("requests.completed", "Completed", "requests", "Requests that received their whole output."),
    Metric(
        "requests.stopped", "Stopped", "requests", "Completed requests that ended with the model's EOS token."
    ),
    Metric(
        "requests.length_capped",
        "Length-capped",
        "requests",
        "Completed requests that ended at their token limit or at the model's context length.",
    ),
    Metric(
        "requests.rejected",
        "Rejected",
        "requests",
        "Requests rejected before scheduling, because they could never fit.",
    ),
    Metric("requests.cancelled", "Cancelled", "requests", "Requests cancelled before they were complete."),
    Metric(
        "requests.unfinished",
        "Unfinished",
        "requests",
        "Requests that had not ended when the run was stopped.",
    ),
    Metric(
        "requests.failed",
        "Failed",
        "requests",
        "Requests that the engine ended with an error, because their KV blocks did not arrive.",
    ),
    Metric("tokens.input", "Input tokens", "tokens", "Prompt tokens of completed requests."),
    Metric("tokens.output", "Output tokens", "tokens", "Emitted tokens of completed requests."),
    Metric("throughput.requests_per_s", "Request throughput", "requests/s", "Completed requests ÷ duration."),
    Metric("throughput.input_tokens_per_s", "Input token throughput", "tokens/s", "Input tokens ÷ duration."),
    Metric(
        "throughput.output_tokens_per_s", "Output token throughput", "tokens/s", "Output tokens ÷ duration."
    ),
    Metric(
        "throughput.total_tokens_per_s",
        "Total token throughput",
        "tokens/s",
        "(Input + output tokens) ÷ duration.",
    ),
    Metric(
        "goodput.requests",
        "Good requests",
        "requests",
        "Completed requests with TTFT, E2E and mean gap (ITL objective) at or below every objective that is set; a "
        "single token meets any ITL, a request without output counts only if E2E alone is set.",
    ),
    Metric("goodput.ratio", "SLO attainment", "ratio", "Good requests ÷ all requests of the workload."),
    Metric("goodput.requests_per_s", "Request goodput", "requests/s", "Good requests ÷ duration."),
    Metric(
        "goodput.output_tokens_per_s",
        "Output token goodput",
        "tokens/s",
        "Output tokens of good requests ÷ duration.",
    ),
    Metric(
        "prefix_hit_ratio.first_admission",
        "Prefix hit, first admission",
        "ratio",
        "Prompt tokens found in the prefix cache at the first admission ÷ prompt tokens, over admitted requests.",
    ),
    Metric(
        "prefix_hit_ratio.total",
        "Prefix hit, all admissions",
        "ratio",
        "Tokens found in the prefix cache at any admission ÷ tokens that the requests had (prompt, and output so far) "
        "at every admission; a preempted request's own cached tokens count as hits.",
    ),
    Metric(
        "kv.usage_mean",
        "KV usage, mean",
        "ratio",
        "Active blocks ÷ capacity, averaged over the duration and all workers.",
    ),
    Metric(
        "kv.usage_max",
        "KV usage, max",
        "ratio",
        "Largest active blocks ÷ capacity of any worker at any sample (see below).",
    ),
    Metric(
        "kv.cached_mean",
        "KV cached, mean",
        "ratio",
        "Inactive (cached, evictable) blocks ÷ capacity, averaged over the duration and all workers.",
    ),
    Metric("kv.stored_blocks", "Stored blocks", "blocks", "Blocks that entered the prefix cache."),
    Metric("kv.evictions", "Evictions", "blocks", "Cached blocks that were evicted to make room."),
    Metric(
        "kv.phantom_hit_blocks",
        "Phantom hit blocks",
        "blocks",
        "Blocks counted as hits that did not contain the tokens: a defect of the simulated engine version.",
    ),
    Metric(
        "preemptions",
        "Preemptions",
        "preemptions",
        "Number of times a running request lost its blocks and returned to the queue.",
    ),
    Metric(
        "accept_length",
        "Accept length",
        "tokens",
        "With speculation: mean tokens per verification of drafts, 1 plus the accepted drafts.",
    ),
    Metric(
        "drafted_tokens",
        "Drafted tokens",
        "tokens",
        "Draft tokens that steps verified, with vLLM's speculation.",
    ),
    Metric(
        "wasted_drafts",
        "Wasted drafts",
        "tokens",
        "Drafted tokens that were not accepted.",
    ),
    Metric("steps", "Steps", "steps", "Engine steps over all workers."),
)
"""Each is one number."""

METRICS = DISTRIBUTIONS + SCALARS
BY_KEY = {metric.key: metric for metric in METRICS + TIER_METRICS + HANDOFF_METRICS}

STATISTICS = {
    "avg": "mean",
    "min": "min",
    "max": "max",
    "p99": "p99",
    "p95": "p95",
    "p90": "p90",
    "p75": "p75",
    "p50": "p50",
    "std": "std",
}
"""Columns of the table of distributions: header and field of Statistics."""
