"""Pools of engines whose kind divides a GPU's memory by rules of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.kinds.registry import kind_of
from understudy.run.model_groups import has_uniform_layers

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.kinds.kind import PoolRules
    from understudy.tiers.gpu import GpuSettings


def find_own_pools(engine: EngineConfig, model: str | None) -> PoolRules | None:
    """Return the function that sizes the pools of a model for this kind of engine; None: blocks of one group."""
    kind = kind_of(engine)
    if model is None or (kind.pools_need_different_layers and has_uniform_layers(model)):
        return None
    return kind.apply_pools


def has_pools_of_memory(
    gpu: GpuSettings, engine: EngineConfig, model: str | None, kv_dtype: str | None
) -> bool | None:
    """Whether the engine's pool is the one that follows from the GPU's memory; None: its kind has no own rules."""
    size = find_own_pools(engine, model)
    if model is None or size is None:
        return None
    found, _ = size(gpu, engine, model, kv_dtype, has_blocks=False)
    return bool(found.num_gpu_blocks == engine.num_gpu_blocks)
