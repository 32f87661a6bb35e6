"""Settings that can change while the server runs: `/admin/config`, as in llm-d-inference-sim."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError
from understudy.server.api.fields import read_json
from understudy.server.faults import FAILURES
from understudy.server.latency import LATENCIES, check_latency, check_std_dev

if TYPE_CHECKING:
    from understudy.http import Request
    from understudy.server.faults import Faults
    from understudy.server.worker import Worker


class Wave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that moves between `start` and `end` with a period of `period_s`."""

    type: Literal["oscillate", "ramp", "rampreset", "squarewave"]
    start: float
    end: float
    period_s: float = 60.0

    def at(self, passed_s: float) -> float:
        """Return the value `passed_s` after the start."""
        share = passed_s / self.period_s if self.period_s > 0 else 1.0
        span = self.end - self.start
        match self.type:
            case "oscillate":
                return self.start + span * (1 - math.cos(2 * math.pi * share)) / 2
            case "ramp":
                return self.start + span * min(share, 1.0)
            case "rampreset":
                return self.start + span * (share % 1.0)
        return self.start if share % 1.0 < 0.5 else self.end


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The settings that can change, under llm-d-inference-sim's names. Times are milliseconds."""

    failure_injection_rate: float = 0.0
    failure_types: list[str] = msgspec.field(default_factory=lambda: list(FAILURES))
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    time_to_first_token_std_dev: float = 0.0
    inter_token_latency_std_dev: float = 0.0
    fake_metrics: dict[str, float | Wave] = msgspec.field(default_factory=dict)


_FAKED = {"running-requests": "running", "waiting-requests": "waiting", "kv-cache-usage": "usage"}


class LiveConfig:
    """The changeable settings of one worker. A body with one invalid key changes nothing."""

    def __init__(self, worker: Worker, faults: Faults) -> None:
        self._worker = worker
        self._faults = faults
        self._began_s = time.monotonic()
        latency = worker.latency
        self.config = Config()
        if latency is not None:
            self.config.time_to_first_token = latency.prefill_cost_ms
            self.config.inter_token_latency = latency.decode_cost_ms
            std_devs_ms = latency.std_devs_ms
            self.config.time_to_first_token_std_dev, self.config.inter_token_latency_std_dev = std_devs_ms

    def answer(self, request: Request) -> tuple[int, Any]:
        """Return the settings; a POST changes them first."""
        if request.method not in ("GET", "POST"):
            raise ApiError("only GET and POST", status=405)
        if request.method == "POST":
            try:
                self.update(read_json(request))
            except ConfigError as error:
                raise ApiError(str(error)) from None
        return 200, self.config

    def update(self, changes: Any) -> None:
        """Change some settings. ConfigError names an invalid one; then nothing has changed."""
        if not isinstance(changes, dict):
            raise ConfigError("/admin/config: the body must be an object; give settings by name")
        merged = {**msgspec.to_builtins(self.config), **changes}
        try:
            config = msgspec.convert(merged, Config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"/admin/config: {error}") from None
        latency = self._worker.latency
        if not 0 <= config.failure_injection_rate <= 1:
            raise ConfigError("failure-injection-rate must be in [0, 1]")
        for name in config.failure_types:
            if name not in FAILURES:
                raise ConfigError(f"failure-types: {name!r} is none of {', '.join(FAILURES)}")
        for name in config.fake_metrics:
            if name not in _FAKED:
                raise ConfigError(f"fake-metrics: {name!r} is none of {', '.join(_FAKED)}")
        times = (config.time_to_first_token, config.inter_token_latency)
        for name, value in zip(LATENCIES, times, strict=True):
            check_latency(name, value)
        if latency is None and any(value is not None for value in times):
            raise ConfigError(
                "latencies follow the engine's timing model; start with --time-to-first-token or "
                "--inter-token-latency to set them"
            )
        std_devs_ms = (config.time_to_first_token_std_dev, config.inter_token_latency_std_dev)
        for name, mean_ms, std_dev_ms in zip(LATENCIES, times, std_devs_ms, strict=True):
            check_std_dev(name, mean_ms or 0.0, std_dev_ms)
        self.config = config
        faults = self._faults
        faults.failure_rate = config.failure_injection_rate
        faults.failure_types = tuple(config.failure_types) or tuple(FAILURES)
        if latency is not None:
            latency.prefill_cost_ms = config.time_to_first_token or 0.0
            latency.decode_cost_ms = config.inter_token_latency or 0.0
            latency.std_devs_ms = std_devs_ms
        self._began_s = time.monotonic()
        for metrics in self._worker.metrics:
            metrics.fake = {
                _FAKED[name]: self._make_reader(value) for name, value in config.fake_metrics.items()
            }

    def _make_reader(self, value: float | Wave) -> Any:
        if isinstance(value, Wave):
            return lambda: value.at(time.monotonic() - self._began_s)
        return lambda: float(value)
