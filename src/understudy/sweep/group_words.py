"""Flags from which vLLM derives a candidate's KV cache groups: its block size and its hybrid manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.chosen import choose_block_size
from understudy.engines.kv_groups import kv_cache_groups
from understudy.errors import ConfigError
from understudy.run.model_groups import has_uniform_layers, plan_model_groups

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.sweep.candidate import Candidate

_SIZES = (16, 32, 64, 128, 256)
"""Block sizes that a user may have given to a model whose states make blocks longer, smallest first."""


def add_group_flags(given: dict[str, Any], candidate: Candidate, missing: list[str]) -> None:
    """Set the flags of the groups; append groups that vLLM does not derive from the model to `missing`."""
    settings, engine = candidate.settings, candidate.settings.engine
    if settings.gpu is not None and settings.gpu.disable_hybrid_kv_cache_manager is not None:
        given["disable-hybrid-kv-cache-manager"] = settings.gpu.disable_hybrid_kv_cache_manager
    if not engine.kv_cache_groups:
        return
    if (planned := find_planned_engine(candidate)) is None:
        given["block-size"] = min(group.block_size for group in engine.kv_cache_groups)
        missing.append("kv_cache_groups (vLLM derives them from its model, and starts with those)")
    elif candidate.model is not None and planned.block_size == choose_block_size(candidate.model):
        given.pop("block-size", None)
    else:
        given["block-size"] = planned.block_size
    if engine.prefix_cache_retention_interval is None:
        given["prefix-cache-retention-interval"] = "None"  # vLLM's word for no value; its default is 0


def find_planned_engine(candidate: Candidate) -> EngineConfig | None:
    """Return the engine without groups, with the block size from which vLLM plans the candidate's.

    None if its groups are not those of the model, or if all layers of the model are equal.
    """
    gpu, engine, model = candidate.settings.gpu, candidate.settings.engine, candidate.model
    if gpu is None or model is None or has_uniform_layers(model):
        return None
    groups = engine.kv_cache_groups
    if not groups:
        return engine
    for size in (*_SIZES, *sorted({group.block_size for group in groups})):
        plain = msgspec.structs.replace(engine, kv_cache_groups=(), block_size=size)
        try:
            plan = plan_model_groups(gpu, plain, model, candidate.kv_dtype, has_blocks=True)
        except ConfigError:  # blocks of this size do not fit the model
            continue
        if (kv_cache_groups(plan), plan.hash_block_size) == (groups, engine.block_size):
            return plain
    return None


def count_planned_blocks(candidate: Candidate, planned: EngineConfig) -> int:
    """Return the usable blocks that vLLM plans for a model whose layers differ."""
    gpu, model = candidate.settings.gpu, candidate.model
    assert gpu is not None
    assert model is not None
    plan = plan_model_groups(gpu, planned, model, candidate.kv_dtype, has_blocks=False)
    return plan.num_blocks - 1  # without vLLM's null block
