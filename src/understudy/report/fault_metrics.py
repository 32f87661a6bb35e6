"""Names, units and definitions of the metrics of a run with faults."""

from __future__ import annotations

from understudy.report.metric import Metric

FAULT_METRICS = (
    Metric(
        "fault_report.lost",
        "Requests that lost a worker",
        "requests",
        "Requests whose worker crashed, or drained for too long; each counted once.",
    ),
    Metric(
        "fault_report.failed",
        "Failed losses",
        "losses",
        "Losses after which the request failed (--on-loss fail, --max-attempts, or no worker was left).",
    ),
    Metric("fault_report.retried", "Retries", "losses", "Losses after which the request started anew."),
    Metric(
        "fault_report.migrated",
        "Migrations",
        "losses",
        "Losses after which the request went on elsewhere, with its tokens so far as a part of its prompt.",
    ),
    Metric(
        "fault_report.handed_back",
        "Requests handed back",
        "losses",
        "Losses to workers that had drained for too long (--drain-limit-s).",
    ),
    Metric(
        "fault_report.lost_tokens",
        "Tokens in vain",
        "tokens",
        "Output tokens that lost workers had made of requests that failed or started anew.",
    ),
)
"""Each is one number; only for runs with faults or a limit on drains. `fault_report.faults` lists the faults."""
