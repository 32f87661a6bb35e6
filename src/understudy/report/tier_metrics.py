"""What a report says of tiers and their links, as data."""

from __future__ import annotations

from understudy.report.metric import Metric

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
