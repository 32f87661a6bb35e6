"""Names, units and definitions of the metrics of a fleet whose workers join and leave."""

from __future__ import annotations

from understudy.report.metric import Metric

FLEET_METRICS = (
    Metric(
        "fleet_use.gpu_hours",
        "GPU time",
        "GPU-hours",
        "Time from the order of each worker until it stopped, or until the run ended, × GPUs of a worker.",
    ),
    Metric(
        "fleet_use.gpu_hours_starting",
        "GPU time of start-ups",
        "GPU-hours",
        "Part in which workers were starting.",
    ),
    Metric(
        "fleet_use.gpu_hours_draining",
        "GPU time of drains",
        "GPU-hours",
        "Part in which workers ended the requests that they had.",
    ),
    Metric("fleet_use.cost", "Cost", "price", "GPU time × price of a GPU-hour (--gpu-hour-price)."),
    Metric(
        "fleet_use.good_per_gpu_hour",
        "Good requests per GPU-hour",
        "requests/GPU-hour",
        "Requests within the objectives (completed ones without objectives) ÷ GPU time.",
    ),
    Metric("fleet_use.ready_mean", "Ready workers, mean", "workers", "Ready workers, mean over the run."),
    Metric(
        "fleet_use.ready_max", "Ready workers, most", "workers", "Most workers that were ready at one time."
    ),
    Metric("fleet_use.started", "Workers started", "workers", "Workers that were ordered during the run."),
    Metric("fleet_use.stopped", "Workers stopped", "workers", "Workers that left during the run."),
    Metric(
        "fleet_use.flaps",
        "Flaps",
        "changes",
        "Orders and drains that follow the opposite change within a minute.",
    ),
    Metric(
        "fleet_use.drains_while_queueing",
        "Drains while queueing",
        "workers",
        "Workers that were told to drain while more requests waited than workers were ready.",
    ),
    Metric(
        "fleet_use.recovery_s",
        "Recovery from the load step",
        "s",
        "Time from the largest rise of the arrival rate (in windows of 5 s) to the end of the longest time after it in "
        "which more requests waited than workers were ready; 0 without such a time.",
    ),
)
"""Each is one number; only for runs with a scaler."""
