"""Lateness of the machine: real time of an event minus its due time on the simulated clock."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (
    *(round(10.0**power * step, 9) for power in range(-5, 1) for step in (1, 1.5, 2, 3, 4, 5, 7)),
    10.0,
)
"""Seven bounds per decade, from 10 µs to 10 s: a quantile is accurate to about 20 %."""


class Lateness:
    """A histogram of seconds late, with weights. Early counts as on time."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def record(self, late_s: float, weight: int = 1) -> None:
        """Count `weight` events that were `late_s` late."""
        late_s = max(late_s, 0.0)
        self.counts[bisect_left(BOUNDS_S, late_s)] += weight
        self.count += weight
        self.sum_s += late_s * weight
        self.max_s = max(self.max_s, late_s)

    def quantile(self, share: float, since: list[int] | None = None) -> float:
        """Return the bound (seconds) that at least this share stayed within; 0 without records.

        `since`: earlier values of `counts`, to use only later records.
        """
        counts = (
            self.counts
            if since is None
            else [now - then for now, then in zip(self.counts, since, strict=True)]
        )
        total = sum(counts)
        if total == 0:
            return 0.0
        wanted = share * total
        passed = 0
        for index, count in enumerate(counts):
            passed += count
            if passed >= wanted:
                return min(BOUNDS_S[index], self.max_s) if index < len(BOUNDS_S) else self.max_s
        return self.max_s
