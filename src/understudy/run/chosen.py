"""Settings that vLLM chooses for a model and its GPU where none was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from understudy.defaults import BLOCK_SIZE, BatchLimits, Default, is_default
from understudy.engines.engine_config import EngineConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.groups import layers_of_model
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from understudy.tiers.gpu import GpuSettings

_Engine = TypeVar("_Engine", bound=EngineConfig)


def choose_defaults(gpu: GpuSettings, engine: _Engine, model: str | None) -> _Engine:
    """Replace limits and block size that were not given by those that vLLM chooses for the model on this GPU."""
    if not isinstance(engine, VllmConfig):
        return engine
    limits = gpu.batch_limits(has_largest=engine.profile.has_largest_limits)
    if not engine.enable_chunked_prefill and engine.max_model_len is None and model is not None:
        whole = max(limits.max_num_batched_tokens, known_context(model) or 0)
        limits = limits._replace(max_num_batched_tokens=whole)
    return apply_limits(engine, limits, block_size=None if model is None else choose_block_size(model))


def choose_block_size(model: str) -> int:
    """Return the tokens per block from which vLLM starts for a model; ConfigError names an unknown one.

    For layers that differ it is that of attention, which vLLM then enlarges to the size of a state.
    """
    sizes = [layer.block_size or BLOCK_SIZE for layer in layers_of_model(model) if layer.kind != "mamba"]
    return max(sizes, default=int(BLOCK_SIZE))


def apply_limits(engine: _Engine, limits: BatchLimits, *, block_size: int | None = None) -> _Engine:
    """Replace the limits, and with `block_size` the block size, unless they were given."""
    found: dict[str, Any] = limits._asdict()
    if block_size is not None:
        found["block_size"] = block_size
    chosen = {name: Default(value) for name, value in found.items() if is_default(getattr(engine, name))}
    return msgspec.structs.replace(engine, **chosen) if chosen else engine
