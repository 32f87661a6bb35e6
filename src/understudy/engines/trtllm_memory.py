"""Sizes of a simulated TensorRT-LLM engine's pools: pages, bytes or tokens, as KV cache manager V2 converts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy._core import TrtSettings

_STEP_BYTES = 2 << 20
"""Smallest grain of the device's memory."""


class PoolSize(NamedTuple):
    """Pages of the device, the longest sequence that they hold, and the bytes that were asked for."""

    pages: int
    longest: int
    quota: int


def plan_pool(settings: TrtSettings) -> PoolSize:
    """Plan the pools of these settings. ConfigError: they leave no memory."""
    levels, longest, quota, _ = settings.plan_memory()
    return PoolSize(sum(levels[0]), longest, quota)


def set_pages(settings: TrtSettings, pages: int) -> None:
    """Give the device as many bytes as hold so many pages of all groups of pools, in whole grains."""
    block_bytes = settings.tokens_per_block * settings.num_layers * settings.layer_bytes_per_token
    settings.max_gpu_total_bytes = pages * block_bytes  # enough, whatever the groups are
    _, _, _, page_bytes = settings.plan_memory()
    if len(page_bytes) == 1:
        settings.max_gpu_total_bytes = pages * page_bytes[0]
        return
    low, high = 0, -(-pages * block_bytes // _STEP_BYTES)
    while low + 1 < high:
        middle = (low + high) // 2
        settings.max_gpu_total_bytes = middle * _STEP_BYTES
        if _count_pages(settings) >= pages:
            high = middle
        else:
            low = middle
    settings.max_gpu_total_bytes = high * _STEP_BYTES


def _count_pages(settings: TrtSettings) -> int:
    """Count the pages of the device; 0 where the bytes hold no block of some group."""
    try:
        return plan_pool(settings).pages
    except ConfigError:
        return 0
