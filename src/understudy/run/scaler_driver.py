"""Calls a scaler at its ticks, with the core's metrics as Dynamo's planner names them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from understudy._core import LifeState, StepLoad
from understudy.errors import ConfigError, PolicyError, UnderstudyError
from understudy.scaling.capabilities import WorkerCapabilities
from understudy.scaling.metrics import ROLES
from understudy.user_code import describe_user_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import FleetMetrics, StepTiming, WorkerMetrics
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.run.autoscale import Autoscale
    from understudy.run.pools import WorkerPool
    from understudy.scaling.estimates import PassLoad
    from understudy.scaling.metrics import Decision, PassSnapshot, Role, TickMetrics, Traffic

UNLIMITED = 1 << 20
"""Stands for a limit that an engine does not have."""


class SeenTraffic(Protocol):
    """Requests since the last tick: the core's `TrafficWindow`, or that of a live fleet."""

    @property
    def since_ns(self) -> int:
        """Time of the last tick."""

    @property
    def arrived(self) -> int:
        """Requests that arrived."""

    @property
    def completed(self) -> int:
        """Requests that completed; the sums are over these."""

    @property
    def prompt_tokens(self) -> int:
        """Sum of their prompts."""

    @property
    def output_tokens(self) -> int:
        """Sum of their answers."""

    @property
    def hit_share(self) -> float:
        """Sum of the cached shares of their prompts."""

    @property
    def with_tokens(self) -> int:
        """Requests with a first token."""

    @property
    def ttft_ns(self) -> float:
        """Sum of their times to the first token."""

    @property
    def with_gaps(self) -> int:
        """Requests with two tokens or more."""

    @property
    def itl_ns(self) -> float:
        """Sum of their mean gaps between tokens."""


class SeenFleet(Protocol):
    """A fleet at a tick: the core's `FleetMetrics`, or a live fleet."""

    @property
    def now_ns(self) -> int:
        """Time of the tick."""

    @property
    def workers(self) -> list[WorkerMetrics]:
        """Workers that have not stopped, by id."""

    @property
    def traffic(self) -> SeenTraffic:
        """Requests since the last tick."""


class ScaleDecision(NamedTuple):
    """What a scaler ordered at a tick; None: no change."""

    at_ns: int
    prefill: int | None
    decode: int | None


class TimedPass:
    """Duration of a forward pass by the timing model of a pool's workers."""

    def __init__(self, timing: StepTiming, capacity_tokens: int) -> None:
        self._timing = timing
        self._capacity_tokens = capacity_tokens
        self._ask = lru_cache(maxsize=65536)(self._compute)

    def __call__(self, load: PassLoad, /) -> float:
        """Return the duration in ms; 0 for a pass without work."""
        return self._ask(
            load.prefill_requests, load.prefill_tokens, load.decode_requests, load.decode_kv_tokens
        )

    def _compute(self, prompts: int, tokens: int, decodes: int, context_tokens: int) -> float:
        if not (tokens or decodes):
            return 0.0
        parts = min(max(prompts, 1), tokens)
        sizes = [tokens // parts + (part < tokens % parts) for part in range(parts)]
        load = StepLoad(
            chunks=[(size, 0) for size in sizes],
            decodes=decodes,
            context_tokens=context_tokens,
            longest_context=context_tokens // decodes if decodes else 0,
        )
        return self._timing.step_ms(load, self._capacity_tokens)


class ScalerDriver:
    """One run of a scaler.

    A role's workers are those of all its pools; new ones join its first pool, and those of other pools stay. Workers
    that compute prompts and answers have the role decode, as in Dynamo.
    """

    def __init__(
        self, autoscale: Autoscale, pools: Sequence[WorkerPool], timing: TimingModel | None = None
    ) -> None:
        """Make the scaler. ConfigError names a wrong setting."""
        autoscale.check_fleet(pools)
        self._settings = autoscale
        self._roles: list[Role] = ["prefill" if pool.role == "prefill" else "decode" for pool in pools]
        capabilities: dict[str, WorkerCapabilities] = {
            role: describe_worker(pools[self._roles.index(role)].engine, autoscale.gpus_per_worker)
            for role in dict.fromkeys(self._roles)
        }
        engine = pools[self._roles.index("decode")].engine
        most = max(sum(pool.workers for pool in pools if pool.role == role) for role in _given_roles(pools))
        self._most = autoscale.most_workers(most)
        self._scaler = autoscale.make(
            capabilities,
            TimedPass(engine.native_timing(timing), engine.num_gpu_blocks * engine.block_size),
            most_workers=self._most,
        )
        self._ticks = 0
        self.start_ns = [autoscale.start_ns] * len(pools)
        self.decisions: list[ScaleDecision] = []

    @property
    def first_tick_ns(self) -> int:
        """Time of the first tick. ConfigError if it is not a time."""
        try:
            first_ms = float(self._scaler.initial_tick_ms())
        except UnderstudyError:
            raise
        except Exception as error:  # user-defined code
            raise describe_user_failure("autoscale", self._name, error) from error
        if not 0 <= first_ms < 1e12:
            raise ConfigError(f"autoscale: initial_tick_ms() must be 0 or more, got {first_ms}")
        return round(first_ms * 1e6)

    def on_tick(self, core: FleetMetrics | SeenFleet) -> tuple[list[int | None], int | None]:
        """Return the wanted workers of each pool, and the time of the next tick."""
        metrics = self._measure(core)
        self._ticks += 1
        try:
            decision = self._scaler.on_tick(metrics)
            wanted: dict[Role, int | None] = {
                "prefill": _read_target(decision, "target_prefill"),
                "decode": _read_target(decision, "target_decode"),
            }
            next_ms = decision["next_tick_ms"]
        except UnderstudyError:
            raise
        except Exception as error:  # user-defined code
            raise describe_user_failure("autoscale", self._name, error) from error
        targets: list[int | None] = [None] * len(self._roles)
        for role, target in wanted.items():
            if target is None or role not in self._roles:
                wanted[role] = None
                continue
            if self._settings.is_limited:
                target = min(max(target, self._settings.min_workers), self._most)
                wanted[role] = target
            elif self._settings.max_workers is not None:
                target = wanted[role] = min(target, self._settings.max_workers)
            targets[self._roles.index(role)] = max(0, target - self._count_others(role, core))
        if wanted["prefill"] is not None or wanted["decode"] is not None:
            self.decisions.append(ScaleDecision(core.now_ns, wanted["prefill"], wanted["decode"]))
        return targets, None if next_ms is None else round(float(next_ms) * 1e6)

    @property
    def _name(self) -> str:
        given = self._settings.scaler
        return given if isinstance(given, str) else type(given).__qualname__

    def _count_others(self, role: Role, core: SeenFleet) -> int:
        """Count workers of a role outside its first pool that do not drain."""
        first = self._roles.index(role)
        return sum(
            self._roles[one.pool] == role and one.pool != first and one.state != LifeState.DRAINING
            for one in core.workers
        )

    def _measure(self, core: SeenFleet) -> TickMetrics:
        found: dict[Role, list[WorkerMetrics]] = {role: [] for role in ROLES}
        ids: dict[tuple[Role, str], list[int]] = {
            (role, state): [] for role in ROLES for state in ("active", "starting", "draining")
        }
        for one in core.workers:
            role = self._roles[one.pool]
            found[role].append(one)
            ids[role, _STATES[one.state]].append(one.worker)
        prefill, decode = found["prefill"], found["decode"]
        return {
            "tick_ordinal": self._ticks,
            "now_ms": core.now_ns / 1e6,
            "prefill_fpm_snapshots": _list_snapshots(prefill),
            "decode_fpm_snapshots": _list_snapshots(decode),
            "active_prefill_count": len(ids["prefill", "active"]),
            "active_prefill_ids": ids["prefill", "active"],
            "starting_prefill_count": len(ids["prefill", "starting"]),
            "starting_prefill_ids": ids["prefill", "starting"],
            "draining_prefill_count": len(ids["prefill", "draining"]),
            "draining_prefill_ids": ids["prefill", "draining"],
            "non_draining_prefill_count": len(prefill) - len(ids["prefill", "draining"]),
            "total_prefill_count": len(prefill),
            "active_decode_count": len(ids["decode", "active"]),
            "active_decode_ids": ids["decode", "active"],
            "starting_decode_count": len(ids["decode", "starting"]),
            "starting_decode_ids": ids["decode", "starting"],
            "draining_decode_count": len(ids["decode", "draining"]),
            "draining_decode_ids": ids["decode", "draining"],
            "non_draining_decode_count": len(decode) - len(ids["decode", "draining"]),
            "total_decode_count": len(decode),
            "traffic": _traffic_of(core),
        }


_STATES = {
    LifeState.READY: "active",
    LifeState.STARTING: "starting",
    LifeState.RESTARTING: "starting",
    LifeState.DRAINING: "draining",
}


def describe_worker(engine: EngineConfig, gpus: int) -> WorkerCapabilities:
    """Return what scalers ask about a worker with this engine."""
    return WorkerCapabilities(
        num_gpu=gpus,
        max_num_batched_tokens=engine.max_num_batched_tokens or UNLIMITED,
        max_num_seqs=engine.max_num_seqs or UNLIMITED,
        context_length=engine.max_model_len or 0,
        max_kv_tokens=engine.num_gpu_blocks * engine.block_size,
    )


def _given_roles(pools: Sequence[WorkerPool]) -> set[str]:
    return {pool.role for pool in pools}


def _read_target(decision: Decision, name: str) -> int | None:
    value = decision.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < UNLIMITED:
        raise PolicyError(f"autoscale: {name} must be a number of workers or None, got {value!r}")
    return value


def _list_snapshots(workers: Sequence[WorkerMetrics]) -> list[PassSnapshot]:
    """Return the pass of each worker that is ready and has computed anything yet; zeros when it is idle."""
    return [_describe_pass(one) for one in workers if one.has_stepped and one.state == LifeState.READY]


def _describe_pass(one: WorkerMetrics) -> PassSnapshot:
    prefill, decode = one.prefill, one.decode  # each reading makes an object
    queued, resumed = one.queued_prefill, one.queued_decode
    return {
        "worker_id": one.worker,
        "dp_rank": 0,
        "wall_time": one.step_ns / 1e9,
        "num_prefill_requests": prefill.count,
        "sum_prefill_tokens": prefill.tokens,
        "var_prefill_length": prefill.variance,
        "sum_prefill_kv_tokens": one.prefill_context_tokens,
        "num_decode_requests": decode.count,
        "sum_decode_kv_tokens": decode.tokens,
        "var_decode_kv_tokens": decode.variance,
        "num_queued_prefill": queued.count,
        "sum_queued_prefill_tokens": queued.tokens,
        "var_queued_prefill_length": queued.variance,
        "num_queued_decode": resumed.count,
        "sum_queued_decode_kv_tokens": resumed.tokens,
        "var_queued_decode_kv_tokens": resumed.variance,
    }


def _traffic_of(core: SeenFleet) -> Traffic:
    seen = core.traffic

    def mean(total: float, count: int) -> float:
        return total / count if count else 0.0

    return {
        "duration_s": (core.now_ns - seen.since_ns) / 1e9,
        "num_req": seen.arrived,
        "avg_isl": mean(seen.prompt_tokens, seen.completed),
        "avg_osl": mean(seen.output_tokens, seen.completed),
        "avg_ttft_ms": mean(seen.ttft_ns / 1e6, seen.with_tokens),
        "avg_itl_ms": mean(seen.itl_ns / 1e6, seen.with_gaps),
        "shape_count": seen.completed,
        "ttft_count": seen.with_tokens,
        "itl_count": seen.with_gaps,
        "avg_accept_length": None,
        "avg_kv_hit_rate": mean(seen.hit_share, seen.completed),
        "hit_rate_count": seen.completed,
        "accept_length_forward_count": 0,
    }
