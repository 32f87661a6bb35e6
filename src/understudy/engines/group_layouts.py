"""Sizes that follow from the KV cache groups of an engine: for routers, and for the longest request."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import GroupLayout
from understudy.checks import read_as
from understudy.engines.kv_groups import KvCacheGroup, take_kind_names
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.events.group_reader import LEARNABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.engine_config import EngineConfig
    from understudy.events.group_reader import GroupLabel


def group_labels(config: EngineConfig) -> list[tuple[str, int | None, int]]:
    """Return kind, window and block size of each KV cache group, as KV events name them; empty: one group."""
    return [(*group.describe_kind(), group.block_size) for group in config.kv_cache_groups]


def fit_model_len(config: EngineConfig, context: int) -> int:
    """Return the longest request in tokens, up to `context`, that the engine's blocks hold, as vLLM's `auto` does.

    ConfigError when not even one token fits.
    """
    if config.group_layout is None:
        return min(context, config.num_gpu_blocks * config.block_size)

    fitting = bisect_right(
        range(1, context + 1), config.num_gpu_blocks, key=lambda length: count_request_blocks(config, length)
    )
    if fitting == 0:
        raise ConfigError(
            f"max_model_len: {config.num_gpu_blocks} blocks do not hold one token in every KV cache group; give more"
        )
    return fitting


def require_room(config: EngineConfig, max_model_len: int) -> None:
    """Raise ConfigError when one request of `max_model_len` tokens does not fit, as vLLM's start-up does."""
    blocks, size = config.num_gpu_blocks, config.block_size
    remedy = "give more --num-gpu-blocks-override, a smaller --max-model-len, or --max-model-len auto"
    if config.group_layout is None:
        if max_model_len > blocks * size:
            raise ConfigError(
                f"max_model_len={max_model_len} does not fit in {blocks * size} tokens of KV cache "
                f"({blocks} blocks of {size}); {remedy}"
            )
    elif (needed := count_request_blocks(config, max_model_len)) > blocks:
        raise ConfigError(
            f"max_model_len={max_model_len} needs {needed} blocks in all KV cache groups, of which there are "
            f"{blocks}; {remedy}"
        )


def count_request_blocks(config: EngineConfig, length: int) -> int:
    """Return the blocks that vLLM's start-up plans for a request of `length` tokens."""
    layout = msgspec.structs.replace(config, max_model_len=length).group_layout
    return -(-length // config.block_size) if layout is None else layout.blocks_per_request


def layout_of_settings(groups: list[Any], prefix_match_unit: int | None) -> GroupLayout:
    """Return the sizes of groups given as in a configuration file. ConfigError names the wrong field."""
    given = take_kind_names({"kv_cache_groups": groups, "prefix_match_unit": prefix_match_unit})
    return GroupLayout(read_as(VllmConfig, given, "engine").native())


def layout_of_labels(labels: Sequence[GroupLabel]) -> GroupLayout:
    """Return the sizes of groups as their KV events describe them."""
    groups = tuple(
        KvCacheGroup(kind=LEARNABLE[label.kind], block_size=label.block_size, window=label.window)  # type: ignore[arg-type]
        for label in labels
    )
    return GroupLayout(VllmConfig(kv_cache_groups=groups).native())
