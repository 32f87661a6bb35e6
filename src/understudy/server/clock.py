"""Clocks of live engines."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Simulated time in nanoseconds, from 0; runs `speed` times as fast as real time."""

    speed: float

    def now_ns(self) -> int:
        """Return the simulated time."""


class WallClock:
    """Clock that runs `speed` times as fast as real time."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._start_ns = time.monotonic_ns()

    def start_in(self, ahead_ns: int) -> None:
        """Set time 0 to `ahead_ns` of real time from now. Call before the first `now_ns`."""
        self._start_ns = time.monotonic_ns() + ahead_ns

    def now_ns(self) -> int:
        """Return the simulated time since the clock was made, or started; below 0 before that."""
        passed = time.monotonic_ns() - self._start_ns
        return passed if self.speed == 1 else int(passed * self.speed)


class ScriptedClock:
    """Clock whose time is set by the caller, for offline runs."""

    def __init__(self) -> None:
        self.speed = 1.0
        self.time_ns = 0

    def now_ns(self) -> int:
        """Return the time that was last set."""
        return self.time_ns
