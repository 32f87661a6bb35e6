"""Names, units and definitions of the metrics of prefill and decode workers."""

from __future__ import annotations

from understudy.report.metric import Metric

HANDOFF_SCALARS = (
    Metric(
        "handoff.remote",
        "Handed off",
        "requests",
        "Requests whose prompt a prefill worker computed and whose blocks arrived.",
    ),
    Metric(
        "handoff.local",
        "Prompt on the decode worker",
        "requests",
        "Requests whose prompt the decode worker computed, by the rule.",
    ),
    Metric(
        "handoff.fallback",
        "Fallback",
        "requests",
        "Requests whose read failed, and whose prompt the decode worker computed again (kv_load_failure_policy "
        "recompute).",
    ),
    Metric(
        "handoff.failed",
        "Failed hand-offs",
        "requests",
        "Requests whose read failed, and that ended without being computed (kv_load_failure_policy fail).",
    ),
    Metric("handoff.bytes", "Bytes handed off", "bytes", "KV bytes that decode workers read."),
    Metric(
        "handoff.expired_leases",
        "Expired leases",
        "leases",
        "Prompts whose blocks were freed after the lease, before a decode worker read them.",
    ),
    Metric(
        "handoff.late_notifications",
        "Late notifications",
        "reads",
        "Reads that ended after the lease of their blocks: the blocks may have been overwritten before.",
    ),
    Metric(
        "handoff.ttft_ms",
        "TTFT, handed off",
        "ms",
        "Mean TTFT of requests that were handed off, aborted ones with a first token included.",
    ),
)
"""Each is one number; only for runs with prefill and decode workers."""

HANDOFF_ROWS = (
    Metric(
        "handoff.transfer_ms",
        "Transfer",
        "ms",
        "From the posting of a read until its last byte, per request that was handed off.",
    ),
    Metric(
        "handoff.ttft_parts_ms",
        "Parts of the TTFT",
        "ms",
        "Mean parts of the TTFT of requests that were handed off, in order: prefill queue (until its first step), "
        "prefill (until the prompt is computed), hop (until it arrives at the decode worker), decode queue (until the "
        "read is posted), transfer (until the last byte), polls (until the step with the request begins), first step "
        "(until the first token). They add up to the TTFT.",
    ),
    Metric("handoff.pools[].workers", "Workers", "workers", "Workers of the role."),
    Metric(
        "handoff.pools[].busy_mean",
        "Busy, mean",
        "ratio",
        "Share of the duration in which at least one request ran on a worker, averaged over the workers. A preempted "
        "request does not run until it is admitted again.",
    ),
    Metric("handoff.pools[].busy_max", "Busy, max", "ratio", "Busy share of the busiest worker."),
    Metric(
        "handoff.pools[].running_mean",
        "Running, mean",
        "requests",
        "Running requests of a worker, averaged over the duration and the workers.",
    ),
    Metric(
        "handoff.pools[].kv_usage_mean",
        "KV usage, mean",
        "ratio",
        "Active blocks ÷ capacity, averaged over the duration and the workers; kept blocks are active.",
    ),
    Metric(
        "handoff.pools[].held_mean",
        "Kept for others, mean",
        "ratio",
        "Blocks of finished prompts that wait for their decode worker ÷ capacity, averaged over the duration and the "
        "workers.",
    ),
    Metric(
        "handoff.pools[].held_max",
        "Kept for others, max",
        "ratio",
        "Largest kept blocks ÷ capacity of any worker at any sample.",
    ),
    Metric("handoff.links[].links", "Links", "links", "Links of this kind: one per worker, or the backend."),
    Metric(
        "handoff.links[].bandwidth_gbps",
        "Bandwidth",
        "GB/s",
        "Bandwidth of each link, in 10⁹ bytes per second; none if it is unlimited.",
    ),
    Metric("handoff.links[].transfers", "Transfers", "transfers", "Hand-offs over the links."),
    Metric("handoff.links[].bytes", "Bytes", "bytes", "Bytes moved over the links."),
    Metric("handoff.links[].busy_s", "Busy", "s", "Time in which bytes moved, summed over the links."),
    Metric(
        "handoff.links[].utilisation_mean",
        "Used, mean",
        "ratio",
        "Bytes moved within the duration ÷ (bandwidth × duration), averaged over the links; none for unlimited links "
        "and without duration.",
    ),
    Metric("handoff.links[].utilisation_max", "Used, max", "ratio", "Utilisation of the busiest link."),
    Metric(
        "handoff.links[].busy",
        "Busy share",
        "ratio",
        "Share of the duration in which bytes moved over a link, averaged over the links.",
    ),
    Metric(
        "handoff.links[].peak",
        "Used, peak",
        "ratio",
        "Utilisation of the links in the busiest window.",
    ),
    Metric("handoff.links[].window_s", "Window", "s", "Length of a window of the duration."),
    Metric(
        "handoff.links[].window_bytes",
        "Bytes over time",
        "bytes",
        "Bytes moved in each window, summed over the links.",
    ),
    Metric(
        "handoff.links[].window_utilisation",
        "Used over time",
        "ratio",
        "Bytes moved in each window ÷ (bandwidth × window), over the links.",
    ),
    Metric("handoff.window_s", "Window", "s", "Length of a window of the duration."),
    Metric(
        "handoff.window_held",
        "Kept for others over time",
        "ratio",
        "Blocks that prefill workers keep for decode workers ÷ their capacity, mean of each window.",
    ),
)
"""Each is a distribution, a series, or a number per role or kind of link."""

HANDOFF_METRICS = HANDOFF_SCALARS + HANDOFF_ROWS
