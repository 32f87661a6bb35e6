"""KV-aware routing: what it weighs, and why each request went where it went."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from understudy import _core
from understudy.checks import positive_number
from understudy.errors import ConfigError


class KvRouting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the KV-aware router, with Dynamo's names and defaults where it has them.

    The cost of a worker is in blocks: `prefill_load_scale` times the prompt tokens before this request and its own,
    less a credit for those that are cached there (`overlap_score_credit` a block on the device, less of it by
    `overlap_score_credit_decay` on a worker with more to compute than others; the `_hit_weight`s below), plus the
    blocks that decode there, plus `decode_active_request_weight` a request. The lowest cost wins; with a `temperature`,
    others do too, the likelier the cheaper.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    external_cache_hit_weight: float = 0.0
    temperature: float = 0.0

    use_events: bool = True
    """False: no KV events at all; what was sent to a worker is taken for cached there (approximate)."""
    event_delay_ms: float = 0.0
    """From the step in which something happened to the router."""
    event_period_ms: float = 0.0
    """Above 0: events come in bundles, at multiples of this time."""
    event_loss: float = 0.0
    """Share of deliveries (the events of a step each) that never arrive."""
    predict_ttl_ms: float = 0.0
    """Above 0: what was sent to a worker counts as cached there for so long, beside what events say."""
    approximate_ttl_ms: float = 120_000.0
    """Without events: how long what was sent counts."""
    approximate_blocks: int = 0
    """Above 0: without events, the newest so many blocks of a worker count, however old."""

    queue_threshold: float | None = None
    """A request waits in the router while every worker has more than so many of its steps' tokens of prompts before it
    (or while others wait); what is cached where is taken as of its arrival. None: nobody waits."""
    queue_policy: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    """Who goes first: the first that came, the last, or whoever has the fewest tokens to compute. A positive
    `priority` counts as so many seconds, or as so many times the weight; a higher `strict_priority` before all."""

    def __post_init__(self) -> None:
        if self.queue_policy not in ("fcfs", "lcfs", "wspt"):
            raise ConfigError(f"queue_policy must be one of fcfs, lcfs, wspt; got {self.queue_policy!r}")
        if self.queue_policy != "fcfs" and self.queue_threshold is None:
            raise ConfigError(
                f"queue_policy={self.queue_policy} says who of those that wait goes first, and nobody waits without "
                "queue_threshold; give it, or leave queue_policy out"
            )
        for name in ("temperature", "event_delay_ms", "event_period_ms", "predict_ttl_ms", "queue_threshold"):
            if (value := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, positive_number(name, value, or_zero=True))

    def build(
        self, seed: int = 0, *, imposed: npt.NDArray[np.int32] | None = None, keep_decisions: bool = True
    ) -> KvRouter:
        """A router of these settings; ties and losses follow the seed. ConfigError names what cannot be.

        `imposed` names a worker for each request of the workload, which it then takes: costs are computed all the same.
        """
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not np.isfinite(value):
                raise ConfigError(f"{name} must be finite, got {value}")
        if self.approximate_blocks < 0:
            raise ConfigError(f"approximate_blocks must not be negative, got {self.approximate_blocks}")
        return KvRouter(
            **{name: getattr(self, name) for name in self.__struct_fields__},
            seed=seed,
            keep_decisions=keep_decisions,
            imposed=[] if imposed is None else np.asarray(imposed, np.int32).tolist(),
        )


class KvRouter(_core.KvRouter):
    """The native router. It serves one run at a time, and keeps that run's decisions; make it by `KvRouting.build`."""

    @property
    def decisions(self) -> Decisions:
        """Of the last run, in the order in which they were made."""
        return Decisions(**{name: getattr(self, name) for name in Decisions.__struct_fields__})


class Decisions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Why each request went where it went, a row a decision."""

    rows: npt.NDArray[np.int64]
    """Of the workload."""
    time_ns: npt.NDArray[np.int64]
    worker: npt.NDArray[np.int32]
    cost: npt.NDArray[np.float64]
    """Of the chosen worker, in blocks."""
    overlap_blocks: npt.NDArray[np.int32]
    """Leading blocks of the prompt that it was believed to hold on the device."""
    lower_overlap_blocks: npt.NDArray[np.int32]
    """Blocks behind those that it was believed to hold on slower tiers."""
    best_overlap_blocks: npt.NDArray[np.int32]
    """The longest that any worker was believed to hold."""
    true_overlap_blocks: npt.NDArray[np.int32]
    """What the chosen worker really held on the device then."""
    best_true_overlap_blocks: npt.NDArray[np.int32]
    """The longest that any worker really held."""
    cost_regret: npt.NDArray[np.float64]
    """How much more the choice cost than the best one, in the eyes of a router that knows the truth."""
    ties: npt.NDArray[np.int32]
    """Workers that had this cost; a seeded draw took one."""
    waited_ns: npt.NDArray[np.int64]
    """In the router, with a queue threshold."""

    def __len__(self) -> int:
        return len(self.rows)
