"""Convert a tier plan to the core's configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy._core import LinkPairConfig, SharedTierConfig, Tier, TierConfig
from understudy.errors import ConfigError
from understudy.tiers.plan import PlannedLink
from understudy.tiers.policy import OffloadPolicy

if TYPE_CHECKING:
    from understudy.tiers.plan import PlannedTier, TierPlan


def to_core(plan: TierPlan, max_blocks: int, *, seed: int = 0) -> TierConfig:
    """Build the core's tier configuration for one run.

    `max_blocks` is the most blocks that the workload can fill: the capacity of an unlimited tier, and the limit of the
    memory that any tier takes. Each call creates its own offload policy, so one plan serves many runs. ConfigError
    names an invalid setting.
    """
    tiers = {tier.tier: tier for tier in plan.tiers}
    host = tiers[Tier.G2]
    offload = plan.offload
    return TierConfig(
        bytes_per_block=plan.block_bytes,
        g2_blocks=plan.host_blocks(max_blocks),
        # arc exists in mode vllm only, where the store's policy is not used.
        g2_policy="lru" if host.eviction == "arc" else host.eviction,
        host=_link_pair(host.down[0], host.up[0]),
        offload_concurrency=host.offload_concurrency,
        demand_first=offload.demand_first,
        write_through=offload.mode != "evict",
        exclusive=offload.placement == "exclusive",
        min_reuse=offload.min_reuse,
        offload_filter=_create_policy(offload.filter),
        offload_batch_size=offload.offload_batch_size,
        onboard_preempted=offload.onboard_preempted,
        recompute_fallback=offload.recompute_fallback,
        onboard_failure_rate=offload.onboard_failure_rate,
        seed=seed,
        g3=_build_shared_tier(tiers.get(Tier.G3), max_blocks),
        g4=_build_shared_tier(tiers.get(Tier.G4), max_blocks),
        most_blocks=slots_for(None, max_blocks),
    )


def slots_for(blocks: int | None, max_blocks: int) -> int:
    """Return the slots of a tier of `blocks` (None: unlimited); a block that is being loaded may use two."""
    limit = 2 * max_blocks + 64
    return limit if blocks is None else min(blocks, limit)


def _build_shared_tier(tier: PlannedTier | None, max_blocks: int) -> SharedTierConfig | None:
    if tier is None:
        return None
    return SharedTierConfig(
        num_blocks=_capacity(tier, max_blocks),
        policy=tier.eviction,
        worker=_link_pair(_worker_link(tier.down), _worker_link(tier.up)),
        backend=_link_pair(tier.down[-1], tier.up[-1]),
        offload_concurrency=tier.offload_concurrency,
    )


def _worker_link(path: tuple[PlannedLink, ...]) -> PlannedLink:
    """Return the worker's link of a path to a shared tier; unlimited if the path has only the backend's."""
    return path[0] if len(path) == 2 else PlannedLink(path[0].name, math.inf, 0, False, None, None)


def _capacity(tier: PlannedTier, max_blocks: int) -> int:
    return max(max_blocks, 1) if tier.blocks is None else tier.blocks


def _link_pair(down: PlannedLink, up: PlannedLink) -> LinkPairConfig:
    return LinkPairConfig(
        down_gbps=down.bandwidth_gbps,
        up_gbps=up.bandwidth_gbps,
        down_fixed_ns=down.fixed_ns,
        up_fixed_ns=up.fixed_ns,
        duplex_gbps=math.inf if down.duplex_gbps is None else down.duplex_gbps,
    )


def _create_policy(factory: object) -> OffloadPolicy | None:
    if factory is None:
        return None
    assert callable(factory)
    policy = factory()
    if not isinstance(policy, OffloadPolicy):
        raise ConfigError(f"offload.filter returned {policy!r}, which has no select(lineages, reuse)")
    return policy
