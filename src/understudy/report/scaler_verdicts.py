"""Verdicts on a scaler: too late, flapping, or draining workers while requests wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.report.verdict import Verdict
from understudy.text import quantity

if TYPE_CHECKING:
    from understudy.report.data import ReportData

LONG_S = 10.0
"""Time in a queue, beyond one start of a worker, from which a scaler is late."""
MANY_FLAPS = 3


def scaler_late(report: ReportData) -> Verdict | None:
    """Report that requests queued for longer than one start of a worker takes, and 10 s more."""
    use = report.fleet_use
    if use is None or (seen := use.longest_queue) is None:
        return None
    lasted_s = seen.end_s - seen.start_s
    if lasted_s <= float(report.run.autoscale.get("startup_s", 0.0)) + LONG_S:
        return None
    begin = (
        f"from {seen.start_s:.0f} s on, more requests waited than workers were ready, for {lasted_s:.0f} s"
    )
    if seen.first_order_s is None or seen.last_ready_s is None:
        return Verdict(
            "scaler_late",
            f"The scaler added no worker to a queue: {begin}.",
            "Raise --max-workers, or use a scaler that reads queues (--autoscale backlog).",
        )
    late = ""
    if seen.fall_s is not None and seen.last_ready_s > seen.fall_s:
        late = f", {seen.last_ready_s - seen.fall_s:.0f} s after arrivals had fallen to half"
    return Verdict(
        "scaler_late",
        f"The scaler was late: {begin}; it ordered a worker {seen.first_order_s - seen.start_s:.0f} s after that, and "
        f"the last of {seen.workers_added} was ready {seen.last_ready_s - seen.start_s:.0f} s after it{late}.",
        "Order several workers at once (--autoscale backlog), keep more ready (--min-workers), or start them faster.",
    )


def scaler_drains_in_queue(report: ReportData) -> Verdict | None:
    """Report that a worker was told to drain while more requests waited than workers were ready."""
    use = report.fleet_use
    if use is None or not use.drains_while_queueing:
        return None
    return Verdict(
        "scaler_drains_in_queue",
        f"The scaler removed workers while requests queued: {use.drains_while_queueing:,} of {use.stopped:,} that left "
        "were told to drain while more requests waited than workers were ready.",
        "Use a scaler that reads queues (--autoscale backlog), or one that waits longer before it removes a worker.",
    )


def scaler_flaps(report: ReportData) -> Verdict | None:
    """Report that changes were undone within a minute, three times or more."""
    use = report.fleet_use
    if use is None or use.flaps < MANY_FLAPS:
        return None
    wasted = quantity(use.gpu_hours_starting / use.gpu_hours, "ratio") if use.gpu_hours else "0 %"
    return Verdict(
        "scaler_flaps",
        f"The scaler flaps: {use.flaps:,} changes were undone within a minute; {wasted} of the GPU time was spent on "
        "starting workers.",
        "Use a longer time before workers are removed (backlog: quiet_s, hpa: stabilization).",
    )
