"""A scaler of our own: workers for what arrives and for what has piled up."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.scaling.capacity import decode_rps, prefill_rps, whole_rps
from understudy.scaling.worker_metrics import roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import PassTime
    from understudy.scaling.metrics import Decision, PassSnapshot, Role, TickMetrics


@dataclass(frozen=True, slots=True)
class BacklogSettings:
    """How fast the scaler reacts, and what it aims at."""

    least: int = 1
    most: int = 8
    interval_s: float = 1.0
    rate_window_s: float = 3.0
    """Time over which arrivals are counted before workers are added."""
    drain_s: float = 30.0
    """Time in which queued requests should be served, once new workers are ready."""
    headroom: float = 0.1
    """Share of capacity that stays free."""
    quiet_s: float = 15.0
    """Time for which fewer workers must have sufficed before one is removed."""
    ttft_ms: float = 2000.0
    itl_ms: float = 100.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"backlog: least {self.least} must be from 1 to `most`, which is {self.most}")
        for name in ("interval_s", "rate_window_s", "drain_s", "ttft_ms", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"backlog {name}: must be above 0")


class BacklogScaler:
    """Add workers for the arrival rate and the queue at once; remove them when fewer have sufficed for a while.

    A worker's rate comes from the timing model for requests of the mean length so far. Workers that are starting count:
    the queue that they will serve asks for no second one.
    """

    def __init__(
        self,
        settings: BacklogSettings,
        capabilities: Mapping[str, WorkerCapabilities],
        pass_time: PassTime | None,
    ) -> None:
        """Keep the settings. ConfigError without a timing model."""
        if pass_time is None:
            raise ConfigError("backlog: needs a timing model of a forward pass")
        self._settings = settings
        self._capabilities = capabilities
        self._pass_time = pass_time
        self._roles = roles_of(capabilities)
        self._arrivals: deque[tuple[float, float]] = deque()  # (duration in s, requests)
        self._shape = (0.0, 0.0, 0.0)  # ended requests and the sums of their prompt and answer tokens
        self._wishes: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in self._roles}

    def initial_tick_ms(self) -> float:
        """Return the first interval in ms."""
        return self._settings.interval_s * 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the workers that the rate and the queue ask for."""
        decision: Decision = {
            "target_prefill": None,
            "target_decode": None,
            "next_tick_ms": metrics["now_ms"] + self._settings.interval_s * 1000.0,
        }
        self._observe(metrics)
        now_s = metrics["now_ms"] / 1000.0
        if "prefill" in self._roles:
            seen, standing = metrics["prefill_fpm_snapshots"], metrics["non_draining_prefill_count"]
            wanted = self._wanted("prefill", seen, standing, now_s)
            decision["target_prefill"] = wanted if wanted != standing else None
        seen, standing = metrics["decode_fpm_snapshots"], metrics["non_draining_decode_count"]
        wanted = self._wanted("decode", seen, standing, now_s)
        decision["target_decode"] = wanted if wanted != standing else None
        return decision

    def _observe(self, metrics: TickMetrics) -> None:
        traffic = metrics.get("traffic")
        if traffic is None:
            return
        self._arrivals.append((traffic["duration_s"], traffic["num_req"]))
        while (
            sum(duration for duration, _ in self._arrivals) - self._arrivals[0][0]
            >= self._settings.rate_window_s
        ):
            self._arrivals.popleft()
        count, prompts, answers = self._shape
        ended = traffic["shape_count"]
        self._shape = (
            count + ended,
            prompts + ended * traffic["avg_isl"],
            answers + ended * traffic["avg_osl"],
        )

    def _wanted(self, role: Role, seen: Sequence[PassSnapshot], standing: int, now_s: float) -> int:
        settings = self._settings
        asked = self._asked(role, seen, standing)
        asked = min(max(asked, settings.least), settings.most)
        wishes = self._wishes[role]
        wishes.append((now_s, asked))
        while wishes[0][0] <= now_s - settings.quiet_s:
            wishes.popleft()
        if asked >= standing:
            return asked
        return min(standing, max(wish for _, wish in wishes))

    def _asked(self, role: Role, seen: Sequence[PassSnapshot], standing: int) -> int:
        rate = self._rate_of_worker(role)
        duration = sum(window for window, _ in self._arrivals)
        if rate <= 0 or duration <= 0:
            return standing
        arriving = sum(requests for _, requests in self._arrivals) / duration
        queued = sum(one["num_queued_prefill"] + one["num_queued_decode"] for one in seen)
        return math.ceil(
            (arriving + queued / self._settings.drain_s) / (rate * (1 - self._settings.headroom)) - 1e-9
        )

    def _rate_of_worker(self, role: Role) -> float:
        """Return requests per second of one worker; 0 before a request has ended."""
        count, prompts, answers = self._shape
        if count <= 0:
            return 0.0
        settings, worker, isl, osl = (
            self._settings,
            self._capabilities[role],
            prompts / count,
            answers / count,
        )
        if role == "prefill":
            return prefill_rps(self._pass_time, worker, isl, settings.ttft_ms, None)
        if "prefill" in self._roles:
            return decode_rps(self._pass_time, worker, isl, osl, settings.itl_ms)
        return whole_rps(self._pass_time, worker, isl, osl, settings.ttft_ms, settings.itl_ms, None)
