"""`RunPlan`: workload, fleet and load of an offline run, and what it keeps, checked before it begins."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from understudy._core import NativeRouter
from understudy.checks import whole_number
from understudy.engines.kinds.registry import DEFAULT_ENGINE
from understudy.errors import ConfigError
from understudy.router.kv import KvRouting
from understudy.run.autoscale import Autoscale
from understudy.run.faults import FaultPlan
from understudy.run.pools import WorkerPool, make_pools
from understudy.run.routing_choice import Routing
from understudy.run.session_kv import SessionKv
from understudy.workload import ClosedLoop, Lockstep, OpenLoop, Plays, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.routing_choice import RoutingChoice
    from understudy.tiers.settings import TiersConfig


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Workload, fleet and load of an offline run, and what it keeps.

    Errors: ConfigError for a field of the wrong type or range, and for fields that contradict each other.
    """

    workload: Workload
    engine: EngineConfig | None = None
    _: KW_ONLY
    workers: int = 1
    pools: Sequence[WorkerPool] = ()
    """A fleet whose workers are not all alike, in place of `engine`, `workers` and `tiers`."""
    routing: RoutingChoice = "round_robin"
    """A name, settings of the KV-aware router, or a router of the caller's own."""
    seed: int = 0
    load: OpenLoop | ClosedLoop | Lockstep | Plays | None = None
    """Arrivals (default: at the workload's own pace)."""
    timing: TimingModel | None = None
    """Step times in place of each engine's own."""
    tiers: TiersConfig | None = None
    """Tiers below the device (default: those in the engine's settings)."""
    disaggregation: Disaggregation | None = None
    """Divides requests between pools with the roles prefill and decode; `routing` then chooses prefill workers."""
    ranks: bool = False
    """Whether the ranks of each worker step together, as long as the slowest; all workers where each is one rank."""
    autoscale: Autoscale | None = None
    """A scaler that orders workers during the run; `workers` and pools give those at the start."""
    session_kv: SessionKv | None = None
    """Policies for the KV of sessions between their requests."""
    preparing_plays: int = 0
    """Plays that run before the lanes begin: the first ones of the workload."""
    faults: FaultPlan | None = None
    """What fails during the run, and what becomes of requests that lose their worker."""
    threads: int = 1
    """Above 1 for independent workers: open loop, single turns, round_robin or random routing, neither g3 nor g4."""
    fast_forward: bool = True
    """False simulates every decode step one by one, with the same result."""
    check: bool | Literal["deep"] = False
    """Verify the state after every step; "deep" also replays the run step by step, compares, and adds a note."""
    progress: Callable[[int], None] | None = None
    """Called with the number of finished requests."""
    events: bool = False
    """Keep KV events."""
    kv_trace: bool = False
    """Keep block allocations and evictions."""
    record_steps: str | PathLike[str] | None = None
    """A file for every step of every worker, as a recorded schedule (.gz: gzipped); for built-in eviction policies."""
    on_step_end: Callable[[int, int], None] | None = None
    """Called with the worker and the time (ns) at the end of every step; steps are then simulated one by one."""
    keep_steps: bool = False
    """Keep batches and decisions of all steps; these are then simulated one by one."""
    keep_candidates: bool = False
    """Keep every worker's terms of the cost (kv), or load and cached blocks (others), at each choice of the router."""
    keep_misses: bool = False
    """Keep KV events to explain misses by them; digests leave them out."""

    def __post_init__(self) -> None:
        if isinstance(self.timing, str | type):
            raise ConfigError(
                f"timing must be a TimingModel, an object with its methods, got {self.timing!r}"
            )
        if not isinstance(self.load, OpenLoop | ClosedLoop | Lockstep | Plays | None):
            raise ConfigError(f"load must be an OpenLoop, ClosedLoop, Lockstep or Plays, got {self.load!r}")
        if self.routing is None or isinstance(self.routing, type):
            raise ConfigError(
                f"routing must be {', '.join(get_args(Routing))}, a KvRouting or a Router with choose(request, view), "
                f"not a class; got {self.routing!r}"
            )
        for name in ("fast_forward", "ranks", "keep_steps"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.autoscale, Autoscale | None):
            raise ConfigError(f"autoscale must be an Autoscale, got {self.autoscale!r}")
        if self.autoscale is not None and (self.ranks or isinstance(self.pace, Lockstep)):
            raise ConfigError(
                f"autoscale does not work with {'ranks that step together' if self.ranks else 'lockstep'} yet"
            )
        if not isinstance(self.faults, FaultPlan | None):
            raise ConfigError(f"faults must be a FaultPlan, got {self.faults!r}")
        if self.faults is not None:
            self._check_faults(self.faults)
        if self.progress is not None and not callable(self.progress):
            raise ConfigError(
                f"progress must be a function of the number of finished requests, got {self.progress!r}"
            )
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, 2**64 - 1))
        object.__setattr__(self, "threads", whole_number("threads", self.threads, 1, 4096))
        self._check_steps()
        self._check_pools()
        self._check_graph()
        self._check_session_kv()
        if isinstance(self.pace, OpenLoop) and not self.workload.has_arrivals:
            raise ConfigError(
                "the workload has no timestamps; replay it closed loop (--concurrency N, or load=ClosedLoop(N))"
            )

    @property
    def pace(self) -> OpenLoop | ClosedLoop | Lockstep | Plays:
        """The given load, or the workload's own pace. With a graph, an open or a closed loop is one of plays."""
        if self.workload.graph is None:
            return OpenLoop() if self.load is None else self.load
        match self.load:
            case OpenLoop(arrival_rate_scale=scale):
                return Plays(arrival_rate_scale=scale)
            case ClosedLoop(concurrency=concurrency, turnaround_ms=0):
                return Plays(lanes=concurrency)
            case None:
                return Plays()
        return self.load

    @cached_property
    def fleet(self) -> Sequence[WorkerPool]:
        """Pools of the fleet, however they are given."""
        if self.disaggregation is not None and not self.pools:
            staged = self.disaggregation.make_pools(self.engine or DEFAULT_ENGINE, self.tiers)
            return make_pools(staged, None, self.workers, None)
        return make_pools(self.pools, self.engine, self.workers, self.tiers)

    @property
    def is_deep(self) -> bool:
        """Whether the run is also replayed step by step."""
        return self.check == "deep"

    @property
    def sees_steps(self) -> bool:
        """Whether something reads every step by itself, so that none is fast-forwarded."""
        return self.record_steps is not None or self.on_step_end is not None or self.keep_steps

    @property
    def records_choices(self) -> bool:
        """Whether choices of a router without costs are recorded."""
        return self.keep_candidates or not isinstance(self.routing, str | KvRouting | NativeRouter)

    @property
    def workers_meet(self) -> bool:
        """Whether workers share a router's state or a clock; else they may run one after another."""
        return (
            self.sees_steps
            or self.ranks
            or not isinstance(self.pace, OpenLoop)
            or self.routing not in ("round_robin", "random")
            or bool(self.workload.turn.any())
            or self.workload.has_aborts
            or self.disaggregation is not None
            or self.autoscale is not None
            or self.session_kv is not None
            or self.faults is not None
        )

    def _check_faults(self, plan: FaultPlan) -> None:
        if self.ranks or isinstance(self.pace, Lockstep):
            raise ConfigError(
                f"faults do not work with {'ranks that step together' if self.ranks else 'lockstep'} yet"
            )
        if any(pool.engine.data_parallel_size > 1 for pool in self.fleet):
            raise ConfigError("faults do not work with data-parallel ranks yet; leave data_parallel_size out")
        if self.record_steps is not None:
            raise ConfigError("record_steps does not work with faults; leave one of them out")
        if self.session_kv is not None:
            raise ConfigError("session_kv does not work with faults yet; leave one of them out")
        if plan.drain_limit_s is not None and self.autoscale is None:
            raise ConfigError(
                "drain_limit_s: workers of this run do not drain; give autoscale, or leave it out"
            )

    def _check_graph(self) -> None:
        has_graph, pace = self.workload.graph is not None, self.pace
        if has_graph and not isinstance(pace, Plays):
            raise ConfigError(f"load: requests wait for one another, so that it must be Plays, got {pace!r}")
        if isinstance(pace, Plays) and not has_graph:
            raise ConfigError(
                "load: Plays needs requests that wait for one another, and the workload has none; give OpenLoop, or "
                "ClosedLoop for lanes (--concurrency)"
            )
        if isinstance(pace, Plays) and not pace.lanes and not self.workload.has_arrivals:
            raise ConfigError(
                "the workload has no timestamps; replay it in lanes (--lanes N, or load=Plays(lanes=N))"
            )

    def _check_session_kv(self) -> None:
        settings = self.session_kv
        if settings is None:
            return
        if not isinstance(settings, SessionKv):
            raise ConfigError(f"session_kv must be a SessionKv, got {settings!r}")
        if settings.client_hold_s:
            raise ConfigError("session_kv: client_hold_s is for clients of a live server; leave it out")
        for pool in self.fleet:
            settings.require_tier(has_tier=bool(pool.resolve_tiers().tiers))

    def _check_steps(self) -> None:
        if self.keep_steps and isinstance(self.load, Lockstep):
            raise ConfigError("keep_steps: steps of a lockstep run have no times; leave it out")
        if self.record_steps is not None and self.autoscale is not None:
            raise ConfigError("record_steps does not work with autoscale yet; leave one of them out")
        if isinstance(self.check, bool):
            return
        if self.check != "deep":
            raise ConfigError(f"check must be True, False or 'deep', got {self.check!r}")
        if self.sees_steps or not self.fast_forward:
            raise ConfigError(
                "check='deep' replays fast-forwards, and fast_forward=False, record_steps, keep_steps and on_step_end "
                "turn them off; use check=True"
            )

    def _check_pools(self) -> None:
        if self.disaggregation is not None:
            self.disaggregation.check_pools(self.fleet)
            if self.record_steps is not None:
                raise ConfigError(
                    "record_steps does not work with prefill and decode workers yet; leave it out"
                )
        for pool in self.fleet:
            if self.disaggregation is None and pool.role != "both":
                raise ConfigError(
                    f"disaggregation: pool {pool.name} has the role {pool.role}; give Disaggregation()"
                )
            if self.record_steps is not None:
                pool.engine.check_recordable()
