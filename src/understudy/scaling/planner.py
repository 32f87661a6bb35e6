"""Dynamo's planner: its decisions for a fleet that is measured from outside."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.scaling.budget import GpuBand, clamp_one, clamp_pair, fit_between, guard_one, guard_pair
from understudy.scaling.capacity import decode_rps, prefill_rps, whole_rps
from understudy.scaling.estimates import LatencyEstimates
from understudy.scaling.latency_goals import combine_goals, wanted_between_tokens, wanted_for_first_token
from understudy.scaling.metrics import ROLES, merge_traffic
from understudy.scaling.thresholds import wanted_by_thresholds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.scaling.budget import Pair
    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.estimates import PassTime
    from understudy.scaling.metrics import Decision, PassSnapshot, Role, TickMetrics, Traffic
    from understudy.scaling.planner_settings import PlannerSettings


class DynamoPlanner:
    """Decide as Dynamo's planner does: by load every few seconds, by predicted traffic every few minutes."""

    def __init__(
        self,
        settings: PlannerSettings,
        capabilities: Mapping[str, WorkerCapabilities],
        pass_time: PassTime | None = None,
    ) -> None:
        """Keep the settings. ConfigError when a latency goal has no model of a pass."""
        self.settings = settings
        self._split = settings.mode == "disagg"
        roles: tuple[Role, ...] = ("prefill", "decode") if self._split else ("decode",)
        self._workers = {role: _find(capabilities, role) for role in roles}
        self._by_goals = settings.optimization_target == "sla"
        if self._by_goals and pass_time is None:
            raise ConfigError("optimization_target sla: needs a timing model of a forward pass")
        self._pass_time = pass_time
        self._estimates = {
            role: LatencyEstimates(
                role if self._split else "both", pass_time, self._workers[role], settings.max_num_fpm_samples
            )
            for role in roles
            if pass_time is not None
        }
        self._seen: dict[Role, dict[tuple[int, int], PassSnapshot]] = {"prefill": {}, "decode": {}}
        self._targets: dict[Role, int | None] = {"prefill": None, "decode": None}
        self._floors: dict[Role, int] = {"prefill": 1, "decode": 1}
        self._traffic: Traffic | None = None
        self._last_traffic: tuple[float, float, float] | None = None  # requests, isl, osl
        self._hit_rate: float | None = None
        self._accepted = 1.0
        self._tick_s = 0.0
        self._load_s = 0.0
        self._throughput_s = 0.0

    def initial_tick_ms(self) -> float:
        """Return the time of the first tick in ms."""
        self._tick_s = self.settings.tick_s
        return self._tick_s * 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the wanted numbers of workers; None where nothing changes."""
        settings, now_s = self.settings, self._tick_s
        if not now_s:
            self.initial_tick_ms()
            now_s = self._tick_s
        self._keep_snapshots(metrics)
        traffic = metrics.get("traffic")
        if traffic is not None:
            self._traffic = merge_traffic(self._traffic, traffic)
        by_load = _is_due(self._load_s, settings.load_adjustment_interval_seconds, now_s)
        by_traffic = settings.scales_by_throughput and _is_due(
            self._throughput_s, settings.throughput_adjustment_interval_seconds, now_s
        )
        ready = {"prefill": metrics["active_prefill_count"], "decode": metrics["active_decode_count"]}
        standing = {
            "prefill": metrics["non_draining_prefill_count"],
            "decode": metrics["non_draining_decode_count"],
        }
        changing = {
            role: (standing[role] if self._targets[role] is None else self._targets[role]) != ready[role]
            or self._targets[role] not in (None, standing[role])
            for role in self._workers
        }
        now: Pair = ready["prefill"] if self._split else 0, ready["decode"]
        proposed: Pair | None = None
        if by_load:
            self._load_s = now_s
            for role, estimates in self._estimates.items():
                estimates.observe(list(self._seen[role].values()))
        if by_traffic or (by_load and self._by_goals and not settings.scales_by_throughput):
            window, self._traffic = self._traffic, None
            if window is not None and window["duration_s"] > 0:
                if by_traffic:
                    proposed = self._by_throughput(window, now)
                else:
                    self._keep_rates(window)
        if by_traffic:
            self._throughput_s = now_s
        if by_load and settings.scales_by_load:
            proposed = self._by_load(now, changing)
        final = self._settle(now, proposed, steady=not any(changing.values()))
        return self._decide(final, metrics, now_s)

    # ── By load ──

    def _by_load(self, now: Pair, changing: dict[Role, bool]) -> Pair | None:
        """Return the pair that passes and queues ask for, within floors and budget; None: no opinion."""
        if any(changing.values()):
            return None
        counts = dict(zip(ROLES, now, strict=True))
        seen = {role: list(self._seen[role].values()) for role in self._workers}
        if not any(seen.values()):
            return None
        if any(found and not _covers(found, counts[role]) for role, found in seen.items()):
            return None
        if not self._split and not seen["decode"]:
            return None
        wishes = [
            self._wish(role, seen[role], counts[role]) if seen[role] else None for role in self._workers
        ]
        if not self._split:
            return self._by_load_whole(now, wishes[0])
        wanted: Pair = now[0] if wishes[0] is None else wishes[0], now[1] if wishes[1] is None else wishes[1]
        if self.settings.scales_by_throughput:
            lifted: Pair = max(wanted[0], self._floors["prefill"]), max(wanted[1], self._floors["decode"])
            if lifted != wanted:
                wanted = self._fit_ceiling(now, _at_least(lifted, self._least))
        return self._guard(now, _at_least(wanted, self._least))

    def _by_load_whole(self, now: Pair, wish: int | None) -> Pair | None:
        if wish is None:
            if not self._by_goals:
                return None
            wish = now[1]
        wanted = max(wish, self.settings.floor("decode"))
        if self.settings.scales_by_throughput:
            wanted = max(wanted, self._floors["decode"])
        return 0, guard_one(now[1], wanted, self._costs[1], self.settings.band, self._least[1])

    def _wish(self, role: Role, seen: Sequence[PassSnapshot], workers: int) -> int | None:
        settings, worker = self.settings, self._workers[role]
        if not self._by_goals:
            return wanted_by_thresholds(settings, role, worker, seen, workers)
        if workers == 0:
            return None
        estimates = self._estimates[role]
        if role == "prefill":
            return wanted_for_first_token(settings, role, estimates, seen, workers, self._hit_rate)
        between = wanted_between_tokens(settings, estimates, worker, seen, workers, self._accepted)
        if self._split:
            return between
        first = wanted_for_first_token(settings, role, estimates, seen, workers, self._hit_rate)
        return combine_goals(first, between, workers)

    # ── By predicted traffic ──

    def _by_throughput(self, window: Traffic, now: Pair) -> Pair | None:
        """Return the pair that the last window's traffic needs, or set it as the floor; None: no opinion."""
        self._keep_rates(window)
        predicted = self._predict(window)
        if predicted is None:
            return None
        requests, isl, osl = predicted
        demand = requests / window["duration_s"]
        wanted = self._sized(demand, isl, osl, now)
        limit = self.settings.max_throughput_scaling_replicas
        wanted = _step(now[0], wanted[0], limit), _step(now[1], wanted[1], limit)
        wanted = _at_least(wanted, self._least)
        if self._split:
            wanted = self._fit_ceiling(now, wanted)
        else:
            ceiling = GpuBand(most=self.settings.band.most)
            wanted = 0, guard_one(now[1], wanted[1], self._costs[1], ceiling, self._least[1])
        if self.settings.scales_by_load:
            self._floors = {"prefill": wanted[0], "decode": wanted[1]}
            return None
        if self._split:
            return self._guard(now, wanted)
        return 0, guard_one(now[1], wanted[1], self._costs[1], self.settings.band, self._least[1])

    def _predict(self, window: Traffic) -> tuple[float, float, float] | None:
        """Return requests, prompt and answer length of the next window: as in this one. None before any request."""
        if window["num_req"] == 0:
            if self._last_traffic is None:
                return 0.0, 0.0, 0.0
            self._last_traffic = (0.0, *self._last_traffic[1:])
            return self._last_traffic
        self._last_traffic = (window["num_req"], window["avg_isl"], window["avg_osl"])
        return self._last_traffic

    def _sized(self, demand: float, isl: float, osl: float, now: Pair) -> Pair:
        """Return the workers that sustain so many requests per second; `now` where the model cannot tell."""
        settings, pass_time = self.settings, self._pass_time
        assert pass_time is not None
        if isl <= 0:
            return now
        decode = self._workers["decode"]
        if not self._split:
            rate = (
                whole_rps(
                    pass_time,
                    decode,
                    isl,
                    osl,
                    settings.ttft_ms,
                    settings.itl_ms,
                    self._hit_rate,
                    self._accepted,
                )
                if osl > 0
                else 0.0
            )
            return (0, math.ceil(demand / rate)) if rate > 0 else now
        prompts = prefill_rps(pass_time, self._workers["prefill"], isl, settings.ttft_ms, self._hit_rate)
        answers = decode_rps(pass_time, decode, isl, osl, settings.itl_ms, self._accepted) if osl > 0 else 0.0
        if prompts <= 0 or answers <= 0:
            return now
        return math.ceil(demand / prompts), math.ceil(demand / answers)

    def _keep_rates(self, window: Traffic) -> None:
        if not math.isnan(window["avg_kv_hit_rate"]):
            self._hit_rate = window["avg_kv_hit_rate"]
        accepted = window["avg_accept_length"]
        drafted = self._workers["decode"].speculative_nextn or self.settings.speculative_nextn
        if accepted is not None and math.isfinite(accepted) and drafted > 0:
            self._accepted = min(max(accepted, 1.0), drafted + 1.0)

    # ── Budget, floors, and what the fleet is asked for ──

    @property
    def _costs(self) -> Pair:
        prefill = self._workers.get("prefill")
        return (prefill.num_gpu if prefill else 1), self._workers["decode"].num_gpu

    @property
    def _least(self) -> Pair:
        return (self.settings.floor("prefill") if self._split else 0), self.settings.floor("decode")

    def _guard(self, now: Pair, wanted: Pair) -> Pair:
        if any(have < least for have, least in zip(now, self._least, strict=True)):
            return clamp_pair(_at_least(wanted, self._least), self._costs, self.settings.band, self._least)
        return guard_pair(now, wanted, self._costs, self.settings.band, self._least)

    def _fit_ceiling(self, now: Pair, wanted: Pair) -> Pair:
        """Fit a pair under the ceiling alone: the least budget is no demand, and must not raise a floor."""
        band = GpuBand(most=self.settings.band.most)
        if any(have < least for have, least in zip(now, self._least, strict=True)):
            return clamp_pair(_at_least(wanted, self._least), self._costs, band, self._least)
        return fit_between(now, wanted, self._costs, band, self._least)

    def _settle(self, now: Pair, proposed: Pair | None, *, steady: bool) -> Pair | None:
        """Return the pair that the fleet should have, if it differs from what is ready."""
        wanted = now if proposed is None else proposed
        if steady:
            wanted = _at_least(wanted, self._least)
        if wanted == now:
            return None
        band = self.settings.band
        if self._split:
            wanted = clamp_pair(_at_least(wanted, self._least), self._costs, band, self._least)
        else:
            wanted = 0, clamp_one(max(wanted[1], self._least[1]), self._costs[1], band, self._least[1])
        return None if wanted == now else wanted

    def _decide(self, final: Pair | None, metrics: TickMetrics, now_s: float) -> Decision:
        standing: Pair = metrics["non_draining_prefill_count"], metrics["non_draining_decode_count"]
        for role, count in zip(ROLES, standing, strict=True):
            if self._targets[role] == count:
                self._targets[role] = None
        self._tick_s = now_s + self.settings.tick_s
        decision: Decision = {
            "target_prefill": None,
            "target_decode": None,
            "next_tick_ms": self._tick_s * 1000.0,
        }
        if final is None:
            return decision
        wanted: Pair = final if self._split else (standing[0], final[1])
        if wanted == standing:
            return decision
        if self._split and wanted[0] != standing[0]:
            self._targets["prefill"] = wanted[0]
        if not self._split or wanted[1] != standing[1]:
            self._targets["decode"] = wanted[1]
        decision["target_prefill"], decision["target_decode"] = wanted
        return decision

    def _keep_snapshots(self, metrics: TickMetrics) -> None:
        """Keep the latest pass of each rank of the workers that are ready."""
        found = metrics["prefill_fpm_snapshots"], metrics["decode_fpm_snapshots"]
        active = metrics["active_prefill_ids"], metrics["active_decode_ids"]
        for role, snapshots, ready in zip(ROLES, found, active, strict=True):
            kept = self._seen[role]
            for one in snapshots:
                kept[one["worker_id"], one["dp_rank"]] = one
            there = set(ready)
            for key in [key for key in kept if key[0] not in there]:
                del kept[key]


def _find(capabilities: Mapping[str, WorkerCapabilities], role: Role) -> WorkerCapabilities:
    if role not in capabilities:
        raise ConfigError(f"capabilities: the role {role} is missing; mode disagg needs both")
    return capabilities[role]


def _covers(snapshots: Sequence[PassSnapshot], workers: int) -> bool:
    """Return whether the snapshots are of so many workers, with equal numbers of ranks."""
    ranks: dict[int, int] = {}
    for one in snapshots:
        ranks[one["worker_id"]] = ranks.get(one["worker_id"], 0) + 1
    return len(ranks) == workers and len(set(ranks.values())) == 1


def _is_due(last_s: float, interval_s: float, now_s: float) -> bool:
    return now_s - last_s >= interval_s - 1e-9


def _step(now: int, wanted: int, limit: int) -> int:
    return min(max(wanted, max(0, now - limit)), now + limit)


def _at_least(pair: Pair, floors: Pair) -> Pair:
    return max(pair[0], floors[0]), max(pair[1], floors[1])
