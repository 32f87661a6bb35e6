"""Pools of engines whose kind divides a GPU's memory by rules of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.engines.kinds.registry import kind_of
from understudy.run.model_groups import has_uniform_layers
from understudy.run.sglang_memory import apply_sglang_pools
from understudy.run.trtllm_memory import apply_trtllm_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.engine_config import EngineConfig
    from understudy.tiers.gpu import GpuSettings

_ALL_MODELS: dict[str, Callable[..., tuple[Any, tuple[str, ...]]]] = {"trtllm": apply_trtllm_pool}
_DIFFERENT_LAYERS: dict[str, Callable[..., tuple[Any, tuple[str, ...]]]] = {"sglang": apply_sglang_pools}


def find_own_pools(
    engine: EngineConfig, model: str | None
) -> Callable[..., tuple[Any, tuple[str, ...]]] | None:
    """Return the function that sizes the pools of a model for this kind of engine; None: blocks of one group."""
    if model is None:
        return None
    name = kind_of(engine).name
    return _ALL_MODELS.get(name) or (None if has_uniform_layers(model) else _DIFFERENT_LAYERS.get(name))


def has_pools_of_memory(
    gpu: GpuSettings, engine: EngineConfig, model: str | None, kv_dtype: str | None
) -> bool | None:
    """Whether the engine's pool is the one that follows from the GPU's memory; None: its kind has no own rules."""
    size = find_own_pools(engine, model)
    if size is None:
        return None
    found, _ = size(gpu, engine, model, kv_dtype, has_blocks=False)
    return bool(found.num_gpu_blocks == engine.num_gpu_blocks)
