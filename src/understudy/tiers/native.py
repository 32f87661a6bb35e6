"""A plan in the core's form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from understudy._core import SharedTierConfig, Tier, TierConfig, WayConfig
from understudy.errors import ConfigError
from understudy.tiers.plan import PlannedLink
from understudy.tiers.policy import OffloadPolicy

if TYPE_CHECKING:
    from understudy.tiers.plan import PlannedTier, TierPlan


def to_core(plan: TierPlan, max_blocks: int, *, seed: int = 0) -> TierConfig:
    """The tiers of one run. `max_blocks`, what its workload can ever fill, is the capacity of an unlimited tier.

    No tier takes memory for more than that, however large it is.

    An offload policy is made here, so a plan serves many runs. ConfigError names what cannot work.
    """
    tiers = {tier.tier: tier for tier in plan.tiers}
    host = tiers[Tier.G2]
    offload = plan.offload
    return TierConfig(
        bytes_per_block=plan.block_bytes,
        g2_blocks=plan.host_blocks(max_blocks),
        g2_policy="lru"
        if host.eviction == "arc"
        else host.eviction,  # vLLM's own is not the store's business
        host=_way(host.down[0], host.up[0]),
        offload_concurrency=host.offload_concurrency,
        demand_first=offload.demand_first,
        write_through=offload.mode != "evict",
        exclusive=offload.placement == "exclusive",
        min_reuse=offload.min_reuse,
        offload_filter=_policy(offload.filter),
        offload_batch_size=offload.offload_batch_size,
        onboard_preempted=offload.onboard_preempted,
        recompute_fallback=offload.recompute_fallback,
        onboard_failure_rate=offload.onboard_failure_rate,
        seed=seed,
        g3=_shared(tiers.get(Tier.G3), max_blocks),
        g4=_shared(tiers.get(Tier.G4), max_blocks),
        most_blocks=slots_for(None, max_blocks),
    )


def slots_for(blocks: int | None, max_blocks: int) -> int:
    """As many slots as a tier of `blocks` (none: without a limit) needs: a block that is loaded may have two."""
    most = 2 * max_blocks + 64
    return most if blocks is None else min(blocks, most)


def _shared(tier: PlannedTier | None, max_blocks: int) -> SharedTierConfig | None:
    if tier is None:
        return None
    return SharedTierConfig(
        num_blocks=_capacity(tier, max_blocks),
        policy=tier.eviction,
        worker=_way(_own(tier.down), _own(tier.up)),
        backend=_way(tier.down[-1], tier.up[-1]),
        offload_concurrency=tier.offload_concurrency,
    )


def _own(path: tuple[PlannedLink, ...]) -> PlannedLink:
    """The worker's link of a path to a shared tier: unlimited and free where the path is the backend's alone."""
    return path[0] if len(path) == 2 else PlannedLink(path[0].name, math.inf, 0, False, None, None)


def _capacity(tier: PlannedTier, max_blocks: int) -> int:
    return max(max_blocks, 1) if tier.blocks is None else tier.blocks


def _way(down: PlannedLink, up: PlannedLink) -> WayConfig:
    return WayConfig(
        down_gbps=down.bandwidth_gbps,
        up_gbps=up.bandwidth_gbps,
        down_fixed_ns=down.fixed_ns,
        up_fixed_ns=up.fixed_ns,
        duplex_gbps=math.inf if down.duplex_gbps is None else down.duplex_gbps,
    )


def _policy(make: object) -> OffloadPolicy | None:
    if make is None:
        return None
    assert callable(make)
    policy = make()
    if not isinstance(policy, OffloadPolicy):
        raise ConfigError(f"offload.filter made {policy!r}, which has no select(lineages, reuse)")
    return policy
