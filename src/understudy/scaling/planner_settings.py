"""Settings of Dynamo's planner that its decisions depend on, under Dynamo's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from understudy.errors import ConfigError
from understudy.scaling.budget import GpuBand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.scaling.metrics import Role

IGNORED = {
    "backend",
    "control_api_port",
    "decode_engine_num_gpu",
    "environment",
    "live_dashboard_port",
    "log_dir",
    "metric_reporting_prometheus_port",
    "model_name",
    "namespace",
    "pre_deployment_sweeping_mode",
    "prefill_engine_num_gpu",
    "report_filename",
    "report_interval_hours",
    "report_output_dir",
    "report_write_gzip_log",
}
"""Keys of a deployment that no decision depends on; GPUs of a worker are a capability."""


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the planner aims at, how often it decides, and the limits of the fleet."""

    mode: Literal["agg", "disagg"] = "disagg"
    optimization_target: Literal["throughput", "latency", "load", "sla"] = "throughput"
    enable_load_scaling: bool = False
    enable_throughput_scaling: bool = True
    load_adjustment_interval_seconds: float = 5
    throughput_adjustment_interval_seconds: float = 180
    load_predictor: str = "constant"
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    max_gpu_budget: int = 8
    min_gpu_budget: int = -1
    min_endpoint: int = 1
    prefill_min_endpoint: int | None = None
    decode_min_endpoint: int | None = None
    load_scaling_down_sensitivity: float = 80
    max_throughput_scaling_replicas: int = 8
    max_num_fpm_samples: int = 64
    speculative_nextn: int = 0
    scale_interval_seconds: float | None = None
    """Time between two ticks; None: as `tick_s` says."""
    prefill_scale_up_queue_tokens: float | None = None
    prefill_scale_down_queue_tokens: float | None = None
    decode_scale_up_kv_rate: float | None = None
    decode_scale_down_kv_rate: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        choices = {
            "mode": ("agg", "disagg"),
            "optimization_target": ("throughput", "latency", "load", "sla"),
            **({"load_predictor": ("constant",)} if self.scales_by_throughput else {}),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is not supported; choose {', '.join(allowed)}"
                )
        for name in (
            "load_adjustment_interval_seconds",
            "throughput_adjustment_interval_seconds",
            "ttft_ms",
            "itl_ms",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be above 0")
        if self.optimization_target == "load":
            roles = ("prefill", "decode") if self.mode == "disagg" else ("decode",)
            for role in roles:
                self.thresholds(cast("Role", role))
        if not self.scales_by_load and not self.scales_by_throughput:
            raise ConfigError(
                "enable_load_scaling and enable_throughput_scaling are off; switch on one of them"
            )

    @property
    def scales_by_load(self) -> bool:
        """Whether passes and queues of workers decide; always without a latency goal."""
        return self.enable_load_scaling or self.optimization_target != "sla"

    @property
    def scales_by_throughput(self) -> bool:
        """Whether predicted traffic decides, or sets a floor."""
        return self.enable_throughput_scaling and self.optimization_target == "sla"

    @property
    def tick_s(self) -> float:
        """Time between two ticks in s: the largest of which all intervals are multiples, to the ms."""
        if self.scale_interval_seconds is not None:
            return self.scale_interval_seconds
        intervals = [self.load_adjustment_interval_seconds]
        if self.scales_by_throughput:
            intervals.append(self.throughput_adjustment_interval_seconds)
        return math.gcd(*(round(interval * 1000) for interval in intervals)) / 1000

    @property
    def band(self) -> GpuBand:
        """The budget of GPUs."""
        return GpuBand(self.min_gpu_budget, self.max_gpu_budget)

    def floor(self, role: Role) -> int:
        """Return the least number of workers of a role."""
        own = self.prefill_min_endpoint if role == "prefill" else self.decode_min_endpoint
        return self.min_endpoint if own is None else own

    def thresholds(self, role: Role) -> tuple[float, float]:
        """Return the loads from which one more and one less worker is wanted. ConfigError if they are not usable."""
        if self.optimization_target != "load":
            latency = self.optimization_target == "latency"
            if role == "prefill":
                return (0.1, 0.0) if latency else (1.0, 0.1)
            return (0.4, 0.1) if latency else (1.0, 0.6)
        names = ("prefill_scale_{}_queue_tokens", "decode_scale_{}_kv_rate")[role == "decode"]
        up, down = (cast("float | None", getattr(self, names.format(word))) for word in ("up", "down"))
        if up is None or down is None:
            raise ConfigError(
                f"optimization_target load: set {names.format('up')} and {names.format('down')}"
            )
        if up <= down:
            raise ConfigError(
                f"{names.format('up')}: {up} must be above {names.format('down')}, which is {down}"
            )
        return (up, down) if role == "prefill" else (up / 100.0, down / 100.0)


def read_planner_settings(given: Mapping[str, Any]) -> PlannerSettings:
    """Read the planner's own configuration. ConfigError names a key that is unknown or not supported."""
    scheduling = given.get("scheduling")
    if scheduling is not None:
        if set(scheduling) - {"scale_interval_seconds"}:
            raise ConfigError("planner: scheduling: only scale_interval_seconds is supported")
        given = {name: value for name, value in given.items() if name != "scheduling"} | scheduling
    known = {field.name for field in fields(PlannerSettings)}
    unknown = set(given) - known - IGNORED
    if unknown:
        raise ConfigError(f"planner: unknown setting {', '.join(sorted(unknown))}")
    return PlannerSettings(**{name: value for name, value in given.items() if name in known})
