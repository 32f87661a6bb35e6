"""Two constant step times that may change while the server runs, and their limits."""

from __future__ import annotations

import random

from understudy.errors import ConfigError

LATENCIES = ("time-to-first-token", "inter-token-latency")
MAX_STD_DEV = 0.3
MAX_LATENCY_MS = 86_400_000.0
"""One day: sums of an engine's times must not overflow."""


def check_latency(name: str, value_ms: float | None) -> None:
    """Raise ConfigError for a latency outside 0 … one day."""
    if value_ms is not None and not 0 <= value_ms <= MAX_LATENCY_MS:
        raise ConfigError(f"{name} must be from 0 to {MAX_LATENCY_MS:.0f} ms (a day), got {value_ms:g}")


def check_std_dev(name: str, mean_ms: float, std_dev_ms: float) -> None:
    """Raise ConfigError for a standard deviation above 30 % of the mean, as llm-d-inference-sim."""
    if not 0 <= std_dev_ms <= MAX_STD_DEV * mean_ms:
        raise ConfigError(f"{name}-std-dev must be from 0 to 30 % of {name}={mean_ms:g}, got {std_dev_ms:g}")


class Latency:
    """A timing model of two constants, in milliseconds, that may change between steps."""

    def __init__(
        self,
        prefill_ms: float,
        decode_ms: float,
        std_devs_ms: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        self.prefill_cost_ms = prefill_ms
        self.decode_cost_ms = decode_ms
        self.std_devs_ms = std_devs_ms
        """Standard deviations of prefill and decode."""
        self._draw = random.Random(seed)

    def _sample(self, mean_ms: float, std_dev_ms: float) -> float:
        if not std_dev_ms:
            return mean_ms
        return min(max(self._draw.gauss(mean_ms, std_dev_ms), 0.3 * mean_ms), 1.7 * mean_ms)

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int, /) -> float:  # noqa: ARG002
        """Return the time of a step's prefills together, milliseconds."""
        return self._sample(self.prefill_cost_ms, self.std_devs_ms[0])

    def decode_ms(self, *_: float) -> float:
        """Return the time of a step's decodes together, milliseconds."""
        return self._sample(self.decode_cost_ms, self.std_devs_ms[1])
