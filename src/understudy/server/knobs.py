"""Settings that can be turned while the server runs: `/admin/config`, as llm-d-inference-sim has it."""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError
from understudy.server.api.fields import read_json
from understudy.server.faults import FAILURES

if TYPE_CHECKING:
    from understudy.server.app import App
    from understudy.server.http import Request


class Latency:
    """A timing model of two numbers that may change between steps, in milliseconds."""

    def __init__(
        self, prefill_ms: float, decode_ms: float, strays_ms: tuple[float, float] = (0.0, 0.0), seed: int = 0
    ) -> None:
        self.prefill_cost_ms = prefill_ms
        self.decode_cost_ms = decode_ms
        self.strays_ms = strays_ms
        """Their standard deviations."""
        self._draw = random.Random(seed)

    def _strayed(self, mean_ms: float, stray_ms: float) -> float:
        if not stray_ms:
            return mean_ms
        return min(max(self._draw.gauss(mean_ms, stray_ms), 0.3 * mean_ms), 1.7 * mean_ms)

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:  # noqa: ARG002
        """Of the prompts of a step, together."""
        return self._strayed(self.prefill_cost_ms, self.strays_ms[0])

    def decode_ms(self, *_: float) -> float:
        """Of the decodes of a step, together."""
        return self._strayed(self.decode_cost_ms, self.strays_ms[1])


class Wave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that moves by itself between two others, once a `period_s`."""

    type: Literal["oscillate", "ramp", "rampreset", "squarewave"]
    start: float
    end: float
    period_s: float = 60.0

    def at(self, passed_s: float) -> float:
        """Its value so long after it began."""
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
    """What may be turned, under llm-d-inference-sim's names. Times are milliseconds."""

    failure_injection_rate: float = 0.0
    failure_types: list[str] = msgspec.field(default_factory=lambda: list(FAILURES))
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    time_to_first_token_std_dev: float = 0.0
    inter_token_latency_std_dev: float = 0.0
    fake_metrics: dict[str, float | Wave] = msgspec.field(default_factory=dict)


LATENCIES = ("time-to-first-token", "inter-token-latency")
MAX_STRAY = 0.3
MAX_LATENCY_MS = 86_400_000.0
"""A day: an engine's times must stay small enough to add up."""


def check_latency(name: str, value_ms: float | None) -> None:
    """ConfigError where no step can take so long."""
    if value_ms is not None and not 0 <= value_ms <= MAX_LATENCY_MS:
        raise ConfigError(f"{name} must be from 0 to {MAX_LATENCY_MS:.0f} ms (a day), got {value_ms:g}")


def check_stray(name: str, mean_ms: float, stray_ms: float) -> None:
    """A latency strays by at most 30 %, as llm-d-inference-sim has it. ConfigError."""
    if not 0 <= stray_ms <= MAX_STRAY * mean_ms:
        raise ConfigError(f"{name}-std-dev must be from 0 to 30 % of {name}={mean_ms:g}, got {stray_ms:g}")


_FAKED = {"running-requests": "running", "waiting-requests": "waiting", "kv-cache-usage": "usage"}


class Knobs:
    """The knobs of one worker. A body with one wrong key changes nothing."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._began_s = time.monotonic()
        latency = app.worker.latency
        self.config = Config()
        if latency is not None:
            self.config.time_to_first_token = latency.prefill_cost_ms
            self.config.inter_token_latency = latency.decode_cost_ms
            strays_ms = latency.strays_ms
            self.config.time_to_first_token_std_dev, self.config.inter_token_latency_std_dev = strays_ms

    def answer(self, request: Request) -> tuple[int, Any]:
        """The knobs as they are, after they were turned."""
        if request.method not in ("GET", "POST"):
            raise ApiError("only GET and POST", status=405)
        if request.method == "POST":
            try:
                self.turn(read_json(request))
            except ConfigError as error:
                raise ApiError(str(error)) from None
        return 200, self.config

    def turn(self, changes: Any) -> None:
        """Turn some of them. ConfigError names what cannot be; then nothing has changed."""
        if not isinstance(changes, dict):
            raise ConfigError("the knobs are turned by name: give an object")
        merged = {**msgspec.to_builtins(self.config), **changes}
        try:
            config = msgspec.convert(merged, Config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"/admin/config: {error}") from None
        latency = self._app.worker.latency
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
                "--inter-token-latency to turn them by hand"
            )
        strays_ms = (config.time_to_first_token_std_dev, config.inter_token_latency_std_dev)
        for name, mean_ms, stray_ms in zip(LATENCIES, times, strays_ms, strict=True):
            check_stray(name, mean_ms or 0.0, stray_ms)
        self.config = config
        faults = self._app.faults
        faults.failure_rate = config.failure_injection_rate
        faults.failure_types = tuple(config.failure_types) or tuple(FAILURES)
        if latency is not None:
            latency.prefill_cost_ms = config.time_to_first_token or 0.0
            latency.decode_cost_ms = config.inter_token_latency or 0.0
            latency.strays_ms = strays_ms
        self._began_s = time.monotonic()
        for metrics in self._app.worker.metrics:
            metrics.fake = {_FAKED[name]: self._reader(value) for name, value in config.fake_metrics.items()}

    def _reader(self, value: float | Wave) -> Any:
        if isinstance(value, Wave):
            return lambda: value.at(time.monotonic() - self._began_s)
        return lambda: float(value)
