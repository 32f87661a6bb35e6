"""The fleet of a run: pools of workers with tiers below them, in the core's terms and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from understudy._core import Pool
from understudy.engines.config import describe_scheduling
from understudy.engines.offload import build_vllm_offload
from understudy.errors import ConfigError
from understudy.memory import (
    ABSENT_BYTES,
    SHORT_BLOCKS,
    SLOT_BYTES,
    TIERS_BYTES,
    WORKER_BYTES,
    require_memory,
)
from understudy.run.pools import names_of
from understudy.tiers.native import slots_for, to_core
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.config import VllmConfig
    from understudy.engines.timing import TimingModel
    from understudy.run.pools import WorkerPool
    from understudy.workload import Workload


class FleetPlan:
    """Every worker is a deployment of `ranks` engines, which its pool then has as workers of their own; they `meet`
    unless what they share says that they do not: then they are played one after another.

    ConfigError where the fleet cannot serve the workload, or would not fit into this machine's memory.
    """

    def __init__(
        self, pools: Sequence[WorkerPool], workload: Workload, ranks: int = 1, *, meet: bool = True
    ) -> None:
        if workload.adapter is not None and not all(pool.engine.enable_lora for pool in pools):
            named = ", ".join(workload.adapters[:3])
            raise ConfigError(f"the workload names LoRA adapters ({named}): set enable_lora, and max_loras")
        self.ranks = ranks
        self.deployments = sum(pool.workers for pool in pools)
        self.pools = [msgspec.structs.replace(pool, workers=pool.workers * ranks) for pool in pools]
        self._names = names_of(pools)
        self._plans = [TierPlan.of(pool.below(), pool.engine.block_size) for pool in pools]
        self._most_blocks = _blocks_of(workload, self.engine)
        self._require_memory(meet)

    @property
    def engine(self) -> VllmConfig:
        """Of the first pool: where all must agree, it speaks for them."""
        return self.pools[0].engine

    @property
    def workers(self) -> int:
        """Of all pools."""
        return self.deployments * self.ranks

    @property
    def worker_blocks(self) -> list[int]:
        """On the device of every worker."""
        return [pool.engine.num_gpu_blocks for pool in self.pools for _ in range(pool.workers)]

    def native(self, timing: TimingModel | None, *, events: bool, kv_trace: bool, seed: int) -> list[Pool]:
        """As the core takes it; `timing` is in place of each engine's own."""
        return [
            Pool(
                engine=pool.engine.native(
                    events=events,
                    kv_trace=kv_trace,
                    offload=build_vllm_offload(plan, pool.engine, self._most_blocks),
                ),
                timing=pool.engine.native_timing(timing),
                workers=pool.workers,
                tiers=None if plan is None else to_core(plan, self._most_blocks, seed=seed),
                name=name,
            )
            for pool, plan, name in zip(self.pools, self._plans, self._names, strict=True)
        ]

    def size(self) -> dict[str, int]:
        """For a run's facts."""
        return {"workers": self.workers, **({} if self.ranks == 1 else {"data_parallel_size": self.ranks})}

    def described(self) -> dict[str, Any]:
        """Its settings, for a run's facts: of each pool, where there are several."""
        pools = [
            {
                "scheduling": describe_scheduling([pool.engine]),
                "engine": pool.engine.described(),
                **({} if plan is None else {"tiers": pool.below().described()}),
            }
            for pool, plan in zip(self.pools, self._plans, strict=True)
        ]
        if len(pools) == 1:
            return pools[0]
        return {
            "scheduling": describe_scheduling([pool.engine for pool in self.pools]),
            "pools": [
                {"name": name, "workers": pool.workers, **settings}
                for pool, name, settings in zip(self.pools, self._names, pools, strict=True)
            ],
        }

    def _require_memory(self, meet: bool) -> None:
        """Refuse at once what cannot fit, with an estimate. Slots cost as they are used, so a fleet is as large as its
        content; but a policy of the user's is told of every slot.
        """
        what, need, most = [], 0, self._most_blocks
        for pool, plan in zip(self.pools, self._plans, strict=True):
            tiers = () if plan is None else plan.tiers
            short = SLOT_BYTES * pool.engine.num_gpu_blocks * (pool.engine.num_gpu_blocks < SHORT_BLOCKS)
            there = (
                pool.workers
                if meet or tiers or not isinstance(pool.engine.eviction_policy, str | None)
                else 1
            )
            need += there * (WORKER_BYTES + short + (TIERS_BYTES if tiers else 0))
            need += (pool.workers - there) * ABSENT_BYTES
            own = pool.engine.num_gpu_blocks + sum(
                slots_for(tier.blocks, most) for tier in tiers if not tier.shared
            )
            shared = sum(slots_for(tier.blocks, most) for tier in tiers if tier.shared)
            what.append(
                f"{pool.workers:,} workers of {own:,} blocks"
                + (f" and {shared:,} shared ones" if shared else "")
            )
            slots = [(pool.workers * pool.engine.num_gpu_blocks, pool.engine.eviction_policy)]
            for tier in tiers:
                holders = 1 if tier.shared else pool.workers
                slots.append((holders * slots_for(tier.blocks, most), tier.eviction))
            for there_are, policy in slots:
                native = policy is None or isinstance(policy, str)
                need += SLOT_BYTES * (slots_for(there_are, most) if native else there_are)
        require_memory(
            ", ".join(what),
            need,
            "fewer workers, or fewer blocks (num_gpu_blocks, and those of the tiers), need less",
        )


def _blocks_of(workload: Workload, engine: VllmConfig) -> int:
    """Blocks that hold every token of the workload, if none is shared."""
    tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    return int((-(-tokens // engine.block_size)).sum())
