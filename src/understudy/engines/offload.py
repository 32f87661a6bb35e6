"""vLLM's native host offload for an engine whose tiers ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import Tier
from understudy.engines.offload_profiles import offload_profile
from understudy.errors import ConfigError
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    from understudy._core import VllmOffload
    from understudy.engines.config import VllmConfig
    from understudy.tiers.settings import TiersConfig


UNLIMITED_BLOCKS = 1 << 22
"""Of a host without a limit, where nobody can say what a workload will fill."""


def offload_of(
    tiers: TiersConfig, engine: VllmConfig, max_blocks: int = UNLIMITED_BLOCKS
) -> VllmOffload | None:
    """The offload that the settings of tiers ask for, for an engine that serves."""
    return vllm_offload(TierPlan.of(tiers, engine.block_size), engine, max_blocks, samples=True)


def vllm_offload(
    plan: TierPlan | None, engine: VllmConfig, max_blocks: int, *, samples: bool = False
) -> VllmOffload | None:
    """The offload that a plan of mode vllm asks for, by the rules of the engine's release; None for any other.

    `max_blocks`, what the workload can ever fill, is the capacity of an unlimited host. `samples`: somebody takes what
    histograms count. ConfigError names what the release, or the engine, does not have.
    """
    if plan is None or plan.offload.mode != "vllm":
        return None
    rules = offload_profile(engine.vllm_version)
    host = next(tier for tier in plan.tiers if tier.tier is Tier.G2)
    if host.eviction == "arc" and not rules.has_arc:
        raise ConfigError(f"g2: eviction arc: vLLM {rules.name} does not have it; lru is what it has")
    if engine.kv_manager != "native":
        raise ConfigError(f"offload mode vllm needs kv_manager=native, got {engine.kv_manager}")
    for field in ("aic_nextn", "speculative_config"):
        if getattr(engine, field) is not None:
            raise ConfigError(f"offload mode vllm contradicts {field}: this version knows one or the other")
    if engine.enable_lora:
        raise ConfigError("offload mode vllm contradicts enable_lora: this version knows one or the other")
    if not engine.enable_prefix_caching:
        raise ConfigError("offload mode vllm needs enable_prefix_caching")
    chunk = plan.offload.blocks_per_chunk
    return rules.native(
        host_chunks=plan.host_blocks(max_blocks) // chunk,
        blocks_per_chunk=chunk,
        eviction_policy=str(host.eviction),
        offload_prompt_only=plan.offload.offload_prompt_only,
        samples=samples,
    )
