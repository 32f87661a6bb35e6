"""Block sizes that vLLM chooses for models, and limits in place of those that were not given."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from understudy.defaults import BLOCK_SIZE, BatchLimits, Default, is_default
from understudy.engines.engine_config import EngineConfig
from understudy.groups import layers_of_model

_Engine = TypeVar("_Engine", bound=EngineConfig)


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
