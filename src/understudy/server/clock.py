"""The time that live engines are told."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds of simulated time, from 0; `speedup` of them pass in one of the world's."""

    speedup: float

    def now_ns(self) -> int:
        """Simulated time."""


class WallClock:
    """Time passes by itself, `speedup` times as fast as outside."""

    def __init__(self, speedup: float = 1.0) -> None:
        self.speedup = speedup
        self._start_ns = time.monotonic_ns()

    def start_in(self, ahead_ns: int) -> None:
        """It is 0 in so many nanoseconds of the world's. Before anybody was told the time."""
        self._start_ns = time.monotonic_ns() + ahead_ns

    def now_ns(self) -> int:
        """Simulated time since the clock was made, or started; below 0 before that."""
        passed = time.monotonic_ns() - self._start_ns
        return passed if self.speedup == 1 else int(passed * self.speedup)


class ScriptedClock:
    """Time passes when somebody says so: the offline twin of a wall clock."""

    def __init__(self) -> None:
        self.speedup = 1.0
        self.time_ns = 0

    def now_ns(self) -> int:
        """The time that was last set."""
        return self.time_ns
