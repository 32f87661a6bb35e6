"""KV-aware routing: its settings, and a record of each decision."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from understudy import _core
from understudy.checks import plain_number, positive_number, switch, whole_number
from understudy.errors import ConfigError
from understudy.router.kv_candidates import KvCandidates

_NOT_NEGATIVE = ("temperature", "event_delay_ms", "event_period_ms", "predict_ttl_ms", "queue_threshold")


class KvRouting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the KV-aware router, with Dynamo's names and defaults where it has them.

    The cost of a worker is in blocks. It is `prefill_load_scale` times the queued prompt tokens and this request's own,
    less a credit for cached ones (`overlap_score_credit` per block on the device, reduced by
    `overlap_score_credit_decay` on a worker with more queued prefill than others; the `_hit_weight`s below), plus the
    blocks of decoding requests, plus `decode_active_request_weight` per request. The lowest cost wins; with a
    `temperature`, workers are sampled, with higher probability for lower cost.

    Errors: ConfigError names the wrong field.

    Example:
        us.replay("trace.jsonl", workers=4, routing=us.KvRouting(event_delay_ms=50.0, temperature=0.1))
    """

    overlap_score_credit: float = 1.0
    """Credit per cached block on the device, in blocks."""
    overlap_score_credit_decay: float = 0.0
    """Reduction of that credit on workers with more queued prefill than others."""
    prefill_load_scale: float = 1.0
    """Cost per block of queued prompt tokens."""
    decode_active_request_weight: float = 0.0
    """Cost per decoding request, in blocks."""
    host_cache_hit_weight: float = 0.75
    """Credit per cached block in host memory (g2), relative to the device."""
    disk_cache_hit_weight: float = 0.25
    """Credit per cached block on disk (g3), relative to the device."""
    external_cache_hit_weight: float = 0.0
    """Credit per cached block in the object store (g4), relative to the device."""
    temperature: float = 0.0
    """Above 0: sample workers, with higher probability for lower cost; 0: the lowest cost wins."""

    use_events: bool = True
    """False: use no KV events; prompts sent to a worker count as cached there (an approximation)."""
    event_delay_ms: float = 0.0
    """Delay of KV events from the end of the step to the router, in ms."""
    event_period_ms: float = 0.0
    """Above 0: events are delivered in batches, at multiples of this time in ms."""
    event_loss: float = 0.0
    """Share of deliveries (one per step) that are lost."""
    predict_ttl_ms: float = 0.0
    """Above 0: prompts sent to a worker also count as cached there for this time (ms), in addition to events."""
    index_groups: Literal["all", "first"] = "all"
    """KV cache groups in the index: a hit is what all groups can serve; "first" ignores the others."""
    approximate_ttl_ms: float = 120_000.0
    """Without events: how long prompts sent to a worker count as cached there, in ms."""
    approximate_blocks: int = 0
    """Above 0: without events, only this number of a worker's newest blocks count, without a time limit."""

    queue_threshold: float | None = None
    """A request waits in the router while every worker has more queued prompt tokens than this many of its steps can
    process, or while others wait. Overlap is computed once, when the request arrives. None: no queue."""
    queue_policy: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    """Order of the queue: first come, last come, or fewest tokens to compute. A positive `priority` counts as that many
    seconds, or as a factor of the weight; a higher `strict_priority` always goes first."""

    def __post_init__(self) -> None:
        if self.queue_policy not in ("fcfs", "lcfs", "wspt"):
            raise ConfigError(f"queue_policy must be one of fcfs, lcfs, wspt; got {self.queue_policy!r}")
        if self.queue_policy != "fcfs" and self.queue_threshold is None:
            raise ConfigError(
                f"queue_policy={self.queue_policy} orders the router's queue, which needs queue_threshold; give "
                "it, or leave queue_policy out"
            )
        if self.index_groups not in ("all", "first"):
            raise ConfigError(f"index_groups must be all or first, got {self.index_groups!r}")
        checked: dict[str, float] = {"use_events": switch("use_events", self.use_events)}
        for field in _fields():
            name, value = field.name, getattr(self, field.name)
            if name in _NOT_NEGATIVE and (name != "queue_threshold" or value is not None):
                checked[name] = positive_number(name, value, or_zero=True)
            elif field.type is float:
                checked[name] = plain_number(name, value)
        checked["approximate_blocks"] = whole_number("approximate_blocks", self.approximate_blocks)
        for name, number in checked.items():
            msgspec.structs.force_setattr(self, name, number)

    def build(
        self,
        seed: int = 0,
        *,
        imposed: npt.NDArray[np.int32] | None = None,
        keep_decisions: bool = True,
        keep_candidates: bool = False,
    ) -> KvRouter:
        """Build a router with these settings; ties and losses depend on the seed. ConfigError names a wrong field.

        `imposed` gives a worker for each request of the workload, which is then chosen; costs are still computed.
        `keep_candidates` keeps the terms of every worker's cost at each decision.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not np.isfinite(value):
                raise ConfigError(f"{name} must be finite, got {value}")
        return KvRouter(
            **{name: getattr(self, name) for name in self.__struct_fields__ if name != "index_groups"},
            index_all_groups=self.index_groups == "all",
            seed=seed,
            keep_decisions=keep_decisions,
            keep_candidates=keep_candidates,
            imposed=[] if imposed is None else np.asarray(imposed, np.int32).tolist(),
        )


@cache
def _fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of KvRouting; finding their types takes longer than all checks."""
    return msgspec.structs.fields(KvRouting)


class KvRouter(_core.KvRouter):
    """The native router, for one run at a time; it keeps that run's decisions. Create it with `KvRouting.build`."""

    @property
    def decisions(self) -> Decisions:
        """Decisions of the last run, in order."""
        names = [name for name in Decisions.__struct_fields__ if name != "candidates"]
        columns: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Decisions(**columns, candidates=KvCandidates.take(self))


class Decisions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Decisions of a run with their reasons, one row each."""

    rows: npt.NDArray[np.int64]
    """Rows of the workload."""
    time_ns: npt.NDArray[np.int64]
    worker: npt.NDArray[np.int32]
    cost: npt.NDArray[np.float64]
    """Cost of the chosen worker, in blocks."""
    overlap_blocks: npt.NDArray[np.int32]
    """Leading prompt blocks that the router's index had for the chosen worker on the device."""
    lower_overlap_blocks: npt.NDArray[np.int32]
    """Following prompt blocks that it had on slower tiers."""
    best_overlap_blocks: npt.NDArray[np.int32]
    """Highest `overlap_blocks` of any worker."""
    true_overlap_blocks: npt.NDArray[np.int32]
    """Leading prompt blocks that the chosen worker actually had on the device."""
    best_true_overlap_blocks: npt.NDArray[np.int32]
    """Highest `true_overlap_blocks` of any worker."""
    cost_regret: npt.NDArray[np.float64]
    """Cost of the choice above the lowest cost, both computed from the actual caches."""
    ties: npt.NDArray[np.int32]
    """Workers with this cost; one was chosen by a seeded random draw."""
    waited_ns: npt.NDArray[np.int64]
    """Time in the router's queue, with a queue threshold."""
    candidates: KvCandidates | None = None
    """Workers that could have been chosen, with the terms of their costs, if they were kept."""

    def __len__(self) -> int:
        return len(self.rows)
