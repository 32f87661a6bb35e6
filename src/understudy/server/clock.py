"""Clocks of live engines and of runs in real time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Simulated time in nanoseconds, from 0; runs `speed` times as fast as real time."""

    speed: float

    def now_ns(self) -> int:
        """Return the simulated time."""


class WaitingClock(Protocol):
    """Time of a run in milliseconds, from 0, for a driver that waits itself."""

    @property
    def now_ms(self) -> float:
        """Milliseconds since the run began."""

    def wait_until(self, ms: float) -> None:
        """Wait until that time."""


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

    @property
    def now_ms(self) -> float:
        """Simulated milliseconds since the clock was made."""
        return self.now_ns() / 1e6

    def wait_until(self, ms: float) -> None:
        """Sleep, then poll for the last 2 ms."""
        while (left := (ms - self.now_ms) / self.speed) > 0:
            if left > 2:
                time.sleep((left - 1) / 1e3)


class ScriptedClock:
    """Clock whose time is set by the caller, for offline runs."""

    def __init__(self) -> None:
        self.speed = 1.0
        self.time_ns = 0

    def now_ns(self) -> int:
        """Return the time that was last set."""
        return self.time_ns
