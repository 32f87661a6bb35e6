"""Clocks of live engines and of runs in real time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Simulated time in nanoseconds, from 0; runs `speed` times as fast as real time."""

    speed: float

    def now_ns(self) -> int:
        """Return the simulated time."""

    def wait_until(self, time_ns: int) -> None:
        """Return at that time, or at once if it has passed."""


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

    def wait_until(self, time_ns: int) -> None:
        """Sleep, then poll for the last 2 ms."""
        while (left_ms := (time_ns - self.now_ns()) / self.speed / 1e6) > 0:
            if left_ms > 2:
                time.sleep((left_ms - 1) / 1e3)


class ScriptedClock:
    """Clock whose time is set by the caller, for offline runs."""

    def __init__(self) -> None:
        self.speed = 1.0
        self.time_ns = 0

    def now_ns(self) -> int:
        """Return the time that was last set."""
        return self.time_ns

    def wait_until(self, time_ns: int) -> None:
        """Advance to that time."""
        self.time_ns = max(self.time_ns, time_ns)
