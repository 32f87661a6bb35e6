"""What a report says, as data: name, unit and one-line definition of every number in it.

Tables, JSON, the HTML page and docs/metrics.md all take their wording from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one distribution, of a report. `key` is its dotted path in Report and in the JSON."""

    key: str
    name: str
    unit: str
    definition: str


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

TIER_DISTRIBUTIONS = (
    Metric(
        "tiers.onboard_ms",
        "Onboard latency",
        "ms",
        "From the start of a load to the device until its last block was there, per load that ended, failed ones "
        "included.",
    ),
    Metric(
        "tiers.parked_ms",
        "Parked on onboarding",
        "ms",
        "Time parked while blocks were brought up, per request that was parked, over all its admissions.",
    ),
    Metric(
        "tiers.room_wait_ms",
        "Wait for room",
        "ms",
        "Time that a request waited for slots whose bytes were still leaving the device, per request that did.",
    ),
)
"""Each is `Statistics`; only of runs with tiers."""

TIER_SCALARS = (
    Metric("tiers.parked_s", "Parked, all requests", "s", "Time parked on onboarding, summed over requests."),
    Metric("tiers.room_wait_s", "Wait for room, all requests", "s", "Waits for room, summed over requests."),
    Metric(
        "tiers.held_mean",
        "Held, mean",
        "ratio",
        "Device blocks whose bytes were still leaving ÷ capacity, averaged over the duration and all workers.",
    ),
    Metric(
        "tiers.held_max",
        "Held, max",
        "ratio",
        "Most held blocks ÷ capacity of any worker at any time.",
    ),
    Metric(
        "tiers.counts.offloaded_blocks", "Offloaded blocks", "blocks", "Copies to the host that were started."
    ),
    Metric(
        "tiers.counts.dropped_blocks",
        "Dropped blocks",
        "blocks",
        "Blocks that qualified for a copy to the host, which had no room.",
    ),
    Metric("tiers.counts.onboards", "Loads", "loads", "Loads to the device that were started."),
    Metric(
        "tiers.counts.onboarded_blocks",
        "Onboarded blocks",
        "blocks",
        "Blocks that loads brought to the device.",
    ),
    Metric(
        "tiers.counts.joined_loads",
        "Joined blocks",
        "blocks",
        "Blocks that a request wanted while somebody else's load was bringing them: one transfer serves both.",
    ),
    Metric(
        "tiers.counts.slow_loads",
        "Slow loads",
        "loads",
        "Loads that were not begun, because computing the prefix was estimated to be sooner.",
    ),
    Metric(
        "tiers.counts.failed_loads",
        "Failed loads",
        "loads",
        "Loads that failed; the request computed instead.",
    ),
    Metric(
        "tiers.counts.room_waits",
        "Waits for room",
        "waits",
        "Allocations on the device that had to wait for copies to leave it.",
    ),
    Metric(
        "tiers.counts.deferred_lookups",
        "Deferred lookups",
        "lookups",
        "Under vLLM's offload: lookups of the host that had to be made again in a later step.",
    ),
    Metric(
        "tiers.counts.refused_stores",
        "Refused stores",
        "stores",
        "Under vLLM's offload: offers to the host that found no room, each step's anew.",
    ),
    Metric(
        "tiers.counts.flushed_copies",
        "Flushed copies",
        "copies",
        "Under vLLM's offload: copies that a step waited for, because their blocks had gone to somebody else.",
    ),
)
"""Each is one number; only of runs with tiers."""

TIER_ROWS = (
    Metric(
        "tiers.tiers[].hit_tokens_first",
        "Hit tokens, first admission",
        "tokens",
        "Prompt tokens found on this tier at the first admission.",
    ),
    Metric(
        "tiers.tiers[].hit_ratio_first",
        "Hit, first admission",
        "ratio",
        "The same ÷ prompt tokens of admitted requests; over all tiers it adds up to the prefix hit ratio.",
    ),
    Metric(
        "tiers.tiers[].hit_tokens_total",
        "Hit tokens, all admissions",
        "tokens",
        "Tokens (of the prompt, and of output so far) found on this tier at any admission.",
    ),
    Metric(
        "tiers.tiers[].hit_ratio_total",
        "Hit, all admissions",
        "ratio",
        "The same ÷ tokens that the requests had (prompt, and output so far) at every admission; over all tiers it "
        "adds up to the prefix hit ratio of all admissions.",
    ),
    Metric(
        "tiers.tiers[].capacity_blocks",
        "Capacity",
        "blocks",
        "Blocks that the tier has room for, of all workers together.",
    ),
    Metric(
        "tiers.tiers[].resident_mean",
        "Residency, mean",
        "ratio",
        "Blocks on the tier ÷ capacity, averaged over the duration and all workers.",
    ),
    Metric(
        "tiers.tiers[].resident_max",
        "Residency, max",
        "ratio",
        "Most blocks on the tier ÷ capacity of any worker (g3 and g4: of the tier) at any sample.",
    ),
    Metric(
        "tiers.tiers[].resident_end",
        "Residency, end",
        "ratio",
        "Blocks on the tier ÷ capacity when all transfers had ended.",
    ),
    Metric("tiers.tiers[].stored_blocks", "Stored blocks", "blocks", "Blocks that became findable there."),
    Metric("tiers.tiers[].evicted_blocks", "Evictions", "blocks", "Blocks evicted there to make room."),
    Metric("tiers.links[].links", "Links", "links", "Links of this kind: one a worker, or one of the run."),
    Metric(
        "tiers.links[].bandwidth_gbps",
        "Bandwidth",
        "GB/s",
        "Of each link, in 10⁹ bytes per second; none when it is unlimited.",
    ),
    Metric("tiers.links[].transfers", "Transfers", "transfers", "Transfers that the links carried."),
    Metric(
        "tiers.links[].bytes",
        "Bytes",
        "bytes",
        "Bytes that the links carried, until all transfers had ended.",
    ),
    Metric(
        "tiers.links[].busy_s",
        "Busy",
        "s",
        "Time in which bytes were flowing, summed over the links, until all transfers had ended.",
    ),
    Metric(
        "tiers.links[].utilisation_mean",
        "Utilisation, mean",
        "ratio",
        "Bytes moved within the duration ÷ (bandwidth × duration), averaged over the links.",
    ),
    Metric("tiers.links[].utilisation_max", "Utilisation, max", "ratio", "The same of the busiest link."),
    Metric("tiers.links[].window_s", "Window", "s", "Length of a window of the duration."),
    Metric(
        "tiers.links[].window_bytes",
        "Bytes over time",
        "bytes",
        "Bytes that the links moved in each window, together.",
    ),
    Metric(
        "tiers.links[].window_utilisation",
        "Utilisation over time",
        "ratio",
        "Bytes moved in each window ÷ what the links could have carried in it.",
    ),
)
"""Each is a number of every tier, or of every kind of link; only of runs with tiers."""

TIER_METRICS = TIER_DISTRIBUTIONS + TIER_SCALARS + TIER_ROWS

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
