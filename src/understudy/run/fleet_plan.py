"""The fleet of a run: pools of workers with tiers, converted for the core and for a run's facts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy._core import Pool
from understudy.engines.engine_config import describe_scheduling
from understudy.errors import ConfigError
from understudy.memory import (
    ABSENT_BYTES,
    SHORT_BLOCKS,
    SLOT_BYTES,
    TIERS_BYTES,
    WORKER_BYTES,
    require_memory,
)
from understudy.run.disaggregation import add_transfer
from understudy.run.facts import PoolFacts, RunFacts
from understudy.run.pools import name_pools
from understudy.tiers.native import slots_for, to_core
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import EngineConfig as CoreConfig
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.pools import WorkerPool
    from understudy.workload import Workload


class FleetPlan:
    """Plan the engines of a run. Every worker is a deployment of `ranks` engines, each a worker of its pool.

    `meet`: workers share state and run at the same time; else they run one after another.

    ConfigError where the fleet cannot serve the workload, or would not fit into this machine's memory.
    """

    def __init__(
        self, pools: Sequence[WorkerPool], workload: Workload, ranks: int = 1, *, meet: bool = True
    ) -> None:
        if workload.adapter is not None and not all(pool.engine.accepts_adapters for pool in pools):
            named = ", ".join(workload.adapters[:3])
            raise ConfigError(f"the workload names LoRA adapters ({named}); set enable_lora, and max_loras")
        self.ranks = ranks
        self.deployments = sum(pool.workers for pool in pools)
        self.pools = [msgspec.structs.replace(pool, workers=pool.workers * ranks) for pool in pools]
        self._names = name_pools(pools)
        self._plans = [TierPlan.of(pool.resolve_tiers(), pool.engine.block_size) for pool in pools]
        self._max_blocks = _count_blocks(workload, self.engine)
        self._require_memory(meet)

    @property
    def engine(self) -> EngineConfig:
        """Engine settings of the first pool; used where all pools must agree."""
        return self.pools[0].engine

    @property
    def workers(self) -> int:
        """Number of workers in all pools."""
        return self.deployments * self.ranks

    def worker_blocks(self, pool_of_worker: Sequence[int]) -> list[int]:
        """Return the device blocks of each worker, given its pool."""
        return [self.pools[pool].engine.num_gpu_blocks for pool in pool_of_worker]

    @property
    def shares_tiers(self) -> bool:
        """Whether workers share a tier."""
        return any(tier.shared for plan in self._plans if plan is not None for tier in plan.tiers)

    def native(
        self,
        timing: TimingModel | None,
        *,
        events: bool,
        kv_trace: bool,
        seed: int,
        disaggregation: Disaggregation | None = None,
    ) -> list[Pool]:
        """Build the core's pools; `timing` replaces each engine's own model."""

        def make_config(pool: WorkerPool, plan: TierPlan | None) -> CoreConfig:
            config = pool.engine.core_config(plan, self._max_blocks, events=events, kv_trace=kv_trace)
            return config if disaggregation is None else add_transfer(config, pool, disaggregation)

        return [
            Pool(
                engine=make_config(pool, plan),
                role=pool.role,
                timing=pool.engine.native_timing(timing),
                workers=pool.workers,
                tiers=None if plan is None else to_core(plan, self._max_blocks, seed=seed),
                name=name,
            )
            for pool, plan, name in zip(self.pools, self._plans, self._names, strict=True)
        ]

    def describe(self) -> RunFacts:
        """Return the number of workers and the settings, per pool where there are several."""
        pools = tuple(
            PoolFacts(
                name=name,
                role=pool.role,
                workers=pool.workers,
                scheduling=describe_scheduling([pool.engine]),
                engine=pool.engine.describe(),
                tiers={} if plan is None else pool.resolve_tiers().describe(),
            )
            for pool, plan, name in zip(self.pools, self._plans, self._names, strict=True)
        )
        facts = RunFacts(
            workers=self.workers,
            data_parallel_size=None if self.ranks == 1 else self.ranks,
            scheduling=describe_scheduling([pool.engine for pool in self.pools]),
        )
        if len(pools) > 1:
            return replace(facts, pools=pools)
        return replace(facts, engine=pools[0].engine, tiers=pools[0].tiers)

    def _require_memory(self, meet: bool) -> None:
        """Raise ConfigError if the estimated memory does not fit into this machine.

        A slot uses memory only once it is filled, except that a user-defined policy has an entry for every slot.
        """
        parts, need, most = [], 0, self._max_blocks
        for pool, plan in zip(self.pools, self._plans, strict=True):
            tiers = () if plan is None else plan.tiers
            short = SLOT_BYTES * pool.engine.num_gpu_blocks * (pool.engine.num_gpu_blocks < SHORT_BLOCKS)
            resident = pool.workers if meet or tiers or pool.engine.has_user_policy else 1
            need += resident * (WORKER_BYTES + short + (TIERS_BYTES if tiers else 0))
            need += (pool.workers - resident) * ABSENT_BYTES
            own = pool.engine.num_gpu_blocks + sum(
                slots_for(tier.blocks, most) for tier in tiers if not tier.shared
            )
            shared = sum(slots_for(tier.blocks, most) for tier in tiers if tier.shared)
            parts.append(
                f"{pool.workers:,} workers of {own:,} blocks"
                + (f" and {shared:,} shared ones" if shared else "")
            )
            slots = [(pool.workers * pool.engine.num_gpu_blocks, pool.engine.has_user_policy)]
            for tier in tiers:
                holders = 1 if tier.shared else pool.workers
                has_user_policy = not isinstance(tier.eviction, str | None)
                slots.append((holders * slots_for(tier.blocks, most), has_user_policy))
            for number, has_user_policy in slots:
                need += SLOT_BYTES * (number if has_user_policy else slots_for(number, most))
        require_memory(
            ", ".join(parts),
            need,
            "fewer workers, or fewer blocks (num_gpu_blocks, and those of the tiers), need less",
        )


def _count_blocks(workload: Workload, engine: EngineConfig) -> int:
    """Count the blocks of all KV groups for all tokens of the workload if none are shared."""
    tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    groups = max(1, len(engine.kv_cache_groups))
    return groups * int((-(-tokens // engine.block_size)).sum())
