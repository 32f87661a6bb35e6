"""What a report says, as data: name, unit and one-line definition of every number in it.

Tables, JSON, the HTML page and docs/metrics.md all take their wording from here, that of tiers from `tier_metrics`.
"""

from __future__ import annotations

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
        "First output token − when the engine read the request (at once when idle, else at the end of the step that "
        "ran), per request with at least one token.",
    ),
    Metric(
        "ttst_ms",
        "Time to second token (TTST)",
        "ms",
        "Second output token − first output token, per request with at least two tokens; 0 when one speculative burst "
        "brought both.",
    ),
    Metric(
        "itl_ms",
        "Inter-token latency (ITL)",
        "ms",
        "Every gap between neighbouring output tokens, pooled over all requests; tokens of one speculative burst are "
        "visible together, with gaps of 0 between them.",
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
        "Last output token − arrival, per request; for a request that asked for no output, completion − arrival.",
    ),
    Metric("queue_ms", "Queue time", "ms", "Start of the step that first scheduled the request − arrival."),
    Metric(
        "output_tokens_per_s_per_user",
        "Output token throughput per user",
        "tokens/s",
        "1 ÷ gap for every gap above zero between neighbouring output tokens, pooled over all requests.",
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
        "First arrival to the last token of anybody; to the last completion when no token was emitted.",
    ),
    Metric("requests.total", "Requests", "requests", "All requests of the workload."),
    Metric("requests.completed", "Completed", "requests", "Requests that got their whole output."),
    Metric("requests.stopped", "Stopped", "requests", "Completed requests that the model ended: EOS."),
    Metric(
        "requests.length_capped",
        "Length-capped",
        "requests",
        "Completed requests that their limit ended, or the model's context.",
    ),
    Metric(
        "requests.rejected",
        "Rejected",
        "requests",
        "Requests refused in front of the engine: they could never fit.",
    ),
    Metric("requests.cancelled", "Cancelled", "requests", "Requests withdrawn before they were complete."),
    Metric(
        "requests.unfinished",
        "Unfinished",
        "requests",
        "Requests still without an end when the run was cut off.",
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
        "single token meets any ITL, a request without output counts only when E2E alone is set.",
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
        "at every admission; what a preempted request finds again of its own counts as hit.",
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
        "Most active blocks ÷ capacity of any worker at any sample (see below).",
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
        "Blocks counted as hits that did not hold the tokens: a defect of the engine version that is simulated.",
    ),
    Metric(
        "preemptions",
        "Preemptions",
        "preemptions",
        "How often a running request lost its blocks and had to wait.",
    ),
    Metric(
        "accept_length",
        "Accept length",
        "tokens",
        "With speculation: tokens ÷ turns that verified drafts, 1 and the draft tokens that were accepted.",
    ),
    Metric(
        "drafted_tokens",
        "Drafted tokens",
        "tokens",
        "Drafts that steps verified, with vLLM's speculation.",
    ),
    Metric(
        "wasted_drafts",
        "Wasted drafts",
        "tokens",
        "Of them, those that were not accepted: computed in vain.",
    ),
    Metric("steps", "Steps", "steps", "Engine steps over all workers."),
)
"""Each is one number."""

METRICS = DISTRIBUTIONS + SCALARS
BY_KEY = {metric.key: metric for metric in METRICS + TIER_METRICS}

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
"""Columns of a table of distributions: header and field of Statistics."""
