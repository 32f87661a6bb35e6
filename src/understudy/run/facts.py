"""Facts about a run that reports carry: its workload, settings, digests and wall time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from understudy.errors import InvalidArgument
from understudy.router.kv import KvRouting
from understudy.run.group_facts import GroupFacts  # noqa: TC001  (msgspec reads it)
from understudy.workload.arrivals import ClosedLoop, Lockstep, OpenLoop, Plays  # noqa: TC001  (msgspec reads them)

Settings: TypeAlias = dict[str, Any]
"""Settings by name, as they are written in JSON."""


class TimeFacts(msgspec.Struct, frozen=True):
    """Origin of a run's times."""

    source: str = msgspec.field(name="from")
    outside_domain_share: float
    """Share of step time outside the domain that the timing model was fitted to."""
    front_end_ms: float = 0.0
    """Time between client and engine that TTFT and E2E include."""


class PoolFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of one pool of a fleet."""

    name: str
    workers: int
    scheduling: str
    engine: Settings
    tiers: Settings = msgspec.field(default_factory=dict)
    role: str = "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run. A field with None or without entries is unknown, or does not apply, and is not written."""

    understudy: str | None = None
    """Version of this package."""
    workload: str | None = None
    """Name of the trace file."""
    workload_digest: str | None = None
    """Digest of the requests, independent of the file format."""
    trace_block_size: int | None = None
    """Tokens per hash id of the trace."""
    users: float | None = None
    """Users relative to those of the trace, if they were scaled (`--users`)."""
    notes: tuple[str, ...] = ()
    """Remarks on the workload and on derived settings."""
    online: bool = False
    """Whether live workers served the run, on the wall clock."""
    workers: int | None = None
    """Number of workers, ranks included."""
    data_parallel_size: int | None = None
    """Ranks per worker, if there are several."""
    disaggregation: Settings = field(default_factory=dict)
    """Settings of prefill and decode pools by name."""
    autoscale: Settings = field(default_factory=dict)
    """Scaler, limits and start-up of a fleet that changes."""
    session_kv: Settings = field(default_factory=dict)
    """Policies for the KV of sleeping sessions, and under `done` what they did in numbers."""
    faults: Settings = field(default_factory=dict)
    """Faults of the run, and what becomes of requests that lose their worker."""
    routing: str | KvRouting | None = None
    """Name or settings of the routing."""
    event_delivery: Settings = field(default_factory=dict)
    """Delay, period and loss of the KV events that a user-defined router received, by name."""
    seed: int | None = None
    """Seed of random choices."""
    speedup: float | None = None
    """Speed of the clock of an online run, relative to real time."""
    load: OpenLoop | ClosedLoop | Lockstep | Plays | None = None
    """When requests are sent."""
    scheduling: str | None = None
    """How engines schedule: asynchronous, synchronous, or both."""
    engine: Settings = field(default_factory=dict)
    """Settings of the engine by name."""
    tiers: Settings = field(default_factory=dict)
    """Settings of the tiers by name."""
    pools: tuple[PoolFacts, ...] = ()
    """Pools of a fleet of several; `engine` and `tiers` are empty then."""
    timing: str | None = None
    """Class of a user-defined timing model."""
    times: TimeFacts | None = None
    """Origin of the step times: `source`, `outside_domain_share`, `front_end_ms`."""
    lateness_ms: dict[str, float] = field(default_factory=dict)
    """Quantiles of the machine's lateness in an online run, in ms."""
    played_s: float | None = None
    """Real time that an online run took, in s."""
    decisions: str | None = None
    """Digest of the decisions of the real engine's scheduler."""
    digest: str | None = None
    """Digest of the timeline; equal runs have equal digests."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the parts of the timeline."""
    router: dict[str, float] = field(default_factory=dict)
    """Statistics of the choices of a KV-aware or a user-defined router."""
    kv_groups: GroupFacts | None = None
    """Hits and held blocks of several KV cache groups."""
    max_tokens: int | None = None
    """Limit on output tokens that the run was given."""
    raw_stream: dict[str, float] = field(default_factory=dict)
    """Differences of raw events from consolidated ones."""
    wall_time_s: float | None = None
    """Real time from opening the trace to the finished report, in s."""
    unlimited_hit_ratio: float | None = None
    """Hit ratio of one unlimited cache; None: computed from the workload if it is needed."""
    routed_hit_ratio: float | None = None
    """Hit ratio of unlimited caches, one per worker, with this run's routing; None: computed if it is needed."""

    @property
    def has_kv_groups(self) -> bool:
        """Whether an engine has KV cache groups, so that curves for one group of full attention do not apply."""
        return any(pool.engine.get("kv_cache_groups") for pool in self.pools or (self,))

    def to_dict(self) -> dict[str, Any]:
        """Return the known facts as plain JSON values. InvalidArgument for a setting that does not fit JSON."""
        try:
            facts: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidArgument(f"run must be JSON-serialisable: {error}") from error
        if isinstance(self.routing, KvRouting):
            facts["routing"] = {"kind": "kv", **facts["routing"]}
        return {
            name: value
            for name, value in facts.items()
            if value is not None and value is not False and value not in ([], {})
        }
