"""Kubernetes' Horizontal Pod Autoscaler on metrics of workers, as its documentation describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.scaling.worker_metrics import METRICS, measure_worker, roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.metrics import Decision, Role, TickMetrics


@dataclass(frozen=True, slots=True)
class HpaSettings:
    """A target for the mean of one metric over the workers, and the behaviour that Kubernetes sets by default."""

    metric: str = "queued_requests"
    target: float = 2.0
    least: int = 1
    most: int = 8
    interval_s: float = 15.0
    tolerance: float = 0.1
    down_window_s: float = 300.0
    up_percent: float = 100.0
    up_workers: int = 4
    down_percent: float = 100.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        if self.metric not in METRICS:
            raise ConfigError(f"hpa metric: {self.metric!r} is unknown; choose one of {', '.join(METRICS)}")
        if not self.target > 0 or not self.interval_s > 0:
            raise ConfigError("hpa target and interval_s must be above 0")
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"hpa: least {self.least} must be at least 1 and at most `most`, which is {self.most}"
            )


class HpaRule:
    """Recommend a number of workers of one role, and keep to the limits of change."""

    def __init__(self, settings: HpaSettings) -> None:
        self._settings = settings
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def decide(self, now_s: float, workers: int, recommended: int) -> int:
        """Return the number of workers after the stabilization window, the limits of change, and least and most."""
        settings = self._settings
        self._recommended = [
            (at_s, count) for at_s, count in self._recommended if at_s > now_s - settings.down_window_s
        ]
        self._recommended.append((now_s, recommended))
        highest = max(count for _, count in self._recommended)
        wanted = recommended if recommended >= workers else min(workers, highest)
        self._changes = [(at_s, by) for at_s, by in self._changes if at_s > now_s - 15.0]
        before_up = workers - sum(by for _, by in self._changes if by > 0)
        before_down = workers - sum(by for _, by in self._changes if by < 0)
        up_to = max(math.ceil(before_up * (1 + settings.up_percent / 100)), before_up + settings.up_workers)
        down_to = math.floor(before_down * (1 - settings.down_percent / 100))
        wanted = max(min(wanted, max(up_to, workers)), min(down_to, workers))
        wanted = min(max(wanted, settings.least), settings.most)
        if wanted != workers:
            self._changes.append((now_s, wanted - workers))
        return wanted


def recommend(values: Sequence[float], starting: int, missing: int, target: float, tolerance: float) -> int:
    """Return the number of workers for which the mean would be `target`.

    `values` are of ready workers. Starting workers count as 0 when the mean asks for more; workers without a value
    count as 0 when it asks for more, as on target when it asks for less.
    """
    workers = len(values) + starting + missing
    if not values:
        return workers
    ratio = sum(values) / len(values) / target
    if not missing and not (starting and ratio > 1):
        return len(values) + starting if abs(ratio - 1) <= tolerance else math.ceil(ratio * len(values))
    total, count = sum(values), len(values) + missing
    if ratio < 1:
        total += missing * target
    else:
        count += starting
    then = total / count / target
    if abs(then - 1) <= tolerance or (ratio < 1) != (then < 1):
        return workers
    wanted = math.ceil(then * count)
    return workers if (then < 1 and wanted > workers) or (then > 1 and wanted < workers) else wanted


class HpaScaler:
    """Scale every role by the mean of one metric."""

    def __init__(self, settings: HpaSettings, capabilities: Mapping[str, WorkerCapabilities]) -> None:
        self._settings = settings
        self._capabilities = capabilities
        self._rules: dict[Role, HpaRule] = {role: HpaRule(settings) for role in roles_of(capabilities)}

    def initial_tick_ms(self) -> float:
        """Return the first interval in ms."""
        return self._settings.interval_s * 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the number of workers of each role that its mean asks for."""
        settings = self._settings
        decision: Decision = {
            "target_prefill": None,
            "target_decode": None,
            "next_tick_ms": metrics["now_ms"] + settings.interval_s * 1000.0,
        }
        if "prefill" in self._rules:
            values = self._values("prefill", metrics)
            missing = metrics["active_prefill_count"] - len(values)
            asked = recommend(
                values, metrics["starting_prefill_count"], missing, settings.target, settings.tolerance
            )
            standing = metrics["non_draining_prefill_count"]
            wanted = self._rules["prefill"].decide(metrics["now_ms"] / 1000, standing, asked)
            decision["target_prefill"] = wanted if wanted != standing else None
        values = self._values("decode", metrics)
        missing = metrics["active_decode_count"] - len(values)
        asked = recommend(
            values, metrics["starting_decode_count"], missing, settings.target, settings.tolerance
        )
        standing = metrics["non_draining_decode_count"]
        wanted = self._rules["decode"].decide(metrics["now_ms"] / 1000, standing, asked)
        decision["target_decode"] = wanted if wanted != standing else None
        return decision

    def _values(self, role: Role, metrics: TickMetrics) -> list[float]:
        snapshots = metrics["prefill_fpm_snapshots" if role == "prefill" else "decode_fpm_snapshots"]
        return [measure_worker(self._settings.metric, one, self._capabilities[role]) for one in snapshots]
