"""Build vLLM's native host offload from the settings of tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import Tier
from understudy.engines.offload_profiles import offload_profile
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy._core import VllmOffload
    from understudy.engines.vllm_settings import VllmSettings
    from understudy.tiers.plan import TierPlan


UNLIMITED_BLOCKS = 1 << 22
"""Capacity of an unlimited host when the size of the workload is unknown."""


def build_vllm_offload(
    plan: TierPlan | None, engine: VllmSettings, max_blocks: int, *, samples: bool = False
) -> VllmOffload | None:
    """Build the offload of a plan in mode vllm, by the rules of the engine's release; None for other modes.

    `max_blocks`, the most that the workload can fill, is the capacity of an unlimited host. `samples`: keep samples
    for histograms. ConfigError names a setting that the release or the engine does not have.
    """
    if plan is None or plan.offload.mode != "vllm":
        return None
    rules = offload_profile(engine.vllm_version)
    host = next(tier for tier in plan.tiers if tier.tier is Tier.G2)
    if host.eviction == "arc" and not rules.has_arc:
        raise ConfigError(f"g2: eviction arc: vLLM {rules.name} does not have it; choose lru")
    if engine.kv_manager != "native":
        raise ConfigError(f"offload mode vllm needs kv_manager=native, got {engine.kv_manager}")
    drafts = {"aic_nextn": engine.mocker.aic_nextn, "speculative_config": engine.speculative_config}
    for field, given in drafts.items():
        if given is not None:
            raise ConfigError(f"offload mode vllm contradicts {field}; give one of them")
    if engine.enable_lora:
        raise ConfigError("offload mode vllm contradicts enable_lora; give one of them")
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
