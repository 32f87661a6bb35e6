"""Names, units and definitions of the metrics of tiers and links."""

from __future__ import annotations

from understudy.report.metric import Metric

TIER_DISTRIBUTIONS = (
    Metric(
        "tiers.onboard_ms",
        "Onboard latency",
        "ms",
        "Start of a load to the GPU until its last block arrived, per load that ended, failed loads included.",
    ),
    Metric(
        "tiers.parked_ms",
        "Parked on onboarding",
        "ms",
        "Time a request waited for loads, per request that waited, over all its admissions.",
    ),
    Metric(
        "tiers.room_wait_ms",
        "Wait for room",
        "ms",
        "Time a request waited for blocks that were still being offloaded, per request that waited.",
    ),
)
"""Each is `Statistics`; only for runs with tiers."""

TIER_SCALARS = (
    Metric("tiers.parked_s", "Parked, all requests", "s", "Time waiting for loads, summed over requests."),
    Metric("tiers.room_wait_s", "Wait for room, all requests", "s", "Waits for room, summed over requests."),
    Metric(
        "tiers.held_mean",
        "Held, mean",
        "ratio",
        "GPU blocks that were still being offloaded ÷ capacity, averaged over the duration and all workers.",
    ),
    Metric(
        "tiers.held_max",
        "Held, max",
        "ratio",
        "Largest held blocks ÷ capacity of any worker at any time.",
    ),
    Metric(
        "tiers.counts.offloaded_blocks",
        "Offloaded blocks",
        "blocks",
        "Blocks whose copy to the host was started.",
    ),
    Metric(
        "tiers.counts.dropped_blocks",
        "Dropped blocks",
        "blocks",
        "Blocks that were to be offloaded while the host had no room.",
    ),
    Metric("tiers.counts.onboards", "Loads", "loads", "Loads to the GPU that were started."),
    Metric(
        "tiers.counts.onboarded_blocks",
        "Onboarded blocks",
        "blocks",
        "Blocks that were loaded to the GPU; those of a load whose requests were aborted before its last copy do not "
        "count.",
    ),
    Metric(
        "tiers.counts.joined_loads",
        "Joined blocks",
        "blocks",
        "Blocks that a request needed while another request's load was in flight: one transfer serves both.",
    ),
    Metric(
        "tiers.counts.slow_loads",
        "Slow loads",
        "loads",
        "Loads that were not started, because recomputing the prefix was estimated to be faster.",
    ),
    Metric(
        "tiers.counts.failed_loads",
        "Failed loads",
        "loads",
        "Loads that failed; the request recomputed the prefix.",
    ),
    Metric(
        "tiers.counts.room_waits",
        "Waits for room",
        "waits",
        "Allocations on the GPU that waited for offloads to complete.",
    ),
    Metric(
        "tiers.counts.deferred_lookups",
        "Deferred lookups",
        "lookups",
        "With vLLM's offload: host lookups that were repeated in a later step.",
    ),
    Metric(
        "tiers.counts.refused_stores",
        "Refused stores",
        "stores",
        "With vLLM's offload: stores that the host had no room for, counted in every step.",
    ),
    Metric(
        "tiers.counts.flushed_copies",
        "Flushed copies",
        "copies",
        "With vLLM's offload: copies that a step waited for, because their blocks were already reallocated.",
    ),
)
"""Each is one number; only for runs with tiers."""

TIER_ROWS = (
    Metric(
        "tiers.tiers[].hit_tokens_first",
        "Hit tokens, first",
        "tokens",
        "Prompt tokens found on this tier at the first admission.",
    ),
    Metric(
        "tiers.tiers[].hit_ratio_first",
        "Hit, first",
        "ratio",
        "Hit tokens at the first admission ÷ prompt tokens of admitted requests; the sum over tiers is the prefix hit "
        "ratio.",
    ),
    Metric(
        "tiers.tiers[].hit_tokens_total",
        "Hit tokens, all",
        "tokens",
        "Tokens (prompt, and output so far) found on this tier at any admission.",
    ),
    Metric(
        "tiers.tiers[].hit_ratio_total",
        "Hit, all",
        "ratio",
        "Hit tokens at all admissions ÷ tokens that the requests had (prompt, and output so far) at every admission; "
        "the sum over tiers is the prefix hit ratio of all admissions.",
    ),
    Metric(
        "tiers.tiers[].capacity_blocks",
        "Blocks",
        "blocks",
        "Capacity of the tier in blocks, summed over all workers; none if it is unlimited.",
    ),
    Metric(
        "tiers.tiers[].resident_mean",
        "Full, mean",
        "ratio",
        "Blocks on the tier ÷ capacity, averaged over the duration and all workers; none for an unlimited tier.",
    ),
    Metric(
        "tiers.tiers[].resident_max",
        "Full, max",
        "ratio",
        "Largest blocks on the tier ÷ capacity of any worker (g3 and g4: of the tier) at any sample; none for an "
        "unlimited tier.",
    ),
    Metric(
        "tiers.tiers[].resident_end",
        "Full, end",
        "ratio",
        "Blocks on the tier ÷ capacity when all transfers had ended; none for an unlimited tier.",
    ),
    Metric("tiers.tiers[].stored_blocks", "Stored", "blocks", "Blocks that were stored on the tier."),
    Metric("tiers.tiers[].evicted_blocks", "Evicted", "blocks", "Blocks evicted from the tier to make room."),
    Metric("tiers.links[].links", "Links", "links", "Links of this kind: one per worker, or one shared."),
    Metric(
        "tiers.links[].bandwidth_gbps",
        "Bandwidth",
        "GB/s",
        "Bandwidth of each link, in 10⁹ bytes per second; none if it is unlimited.",
    ),
    Metric("tiers.links[].transfers", "Transfers", "transfers", "Transfers over the links."),
    Metric(
        "tiers.links[].bytes",
        "Bytes",
        "bytes",
        "Bytes moved over the links, until all transfers had ended.",
    ),
    Metric(
        "tiers.links[].busy_s",
        "Busy",
        "s",
        "Time in which bytes moved, summed over the links, until all transfers had ended.",
    ),
    Metric(
        "tiers.links[].utilisation_mean",
        "Used, mean",
        "ratio",
        "Bytes moved within the duration ÷ (bandwidth × duration), averaged over the links; none for unlimited links "
        "and without duration.",
    ),
    Metric("tiers.links[].utilisation_max", "Used, max", "ratio", "Share used of the busiest link."),
    Metric("tiers.links[].window_s", "Window", "s", "Length of a window of the duration."),
    Metric(
        "tiers.links[].window_bytes",
        "Bytes over time",
        "bytes",
        "Bytes moved in each window, summed over the links.",
    ),
    Metric(
        "tiers.links[].window_utilisation",
        "Used over time",
        "ratio",
        "Bytes moved in each window ÷ (bandwidth × window), over the links.",
    ),
)
"""Each is a number per tier or per kind of link; only for runs with tiers."""

TIER_METRICS = TIER_DISTRIBUTIONS + TIER_SCALARS + TIER_ROWS
