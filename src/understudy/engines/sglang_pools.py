"""Pools of a simulated SGLang engine besides the one of full KV: windows and states, sized as SGLang does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from understudy.checks import whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy._core import SglangSettings


class PooledEngine(Protocol):
    """The settings of an SGLang engine that its pools depend on."""

    @property
    def block_size(self) -> int: ...  # noqa: D102
    @property
    def num_gpu_blocks(self) -> int: ...  # noqa: D102
    @property
    def disable_radix_cache(self) -> bool: ...  # noqa: D102
    @property
    def disable_overlap_schedule(self) -> bool: ...  # noqa: D102
    @property
    def swa_window(self) -> int | None: ...  # noqa: D102
    @property
    def swa_full_tokens_ratio(self) -> float: ...  # noqa: D102
    @property
    def max_mamba_cache_size(self) -> int | None: ...  # noqa: D102
    @property
    def mamba_full_memory_ratio(self) -> float: ...  # noqa: D102
    @property
    def mamba_radix_cache_strategy(self) -> str: ...  # noqa: D102
    @property
    def mamba_track_interval(self) -> int: ...  # noqa: D102
    @property
    def mamba_max_states_per_path(self) -> int: ...  # noqa: D102


def count_window_tokens(engine: PooledEngine) -> int:
    """Return the tokens of the window pool: a share of the full pool, in whole pages."""
    tokens = int(engine.num_gpu_blocks * engine.block_size * engine.swa_full_tokens_ratio)
    return tokens // engine.block_size * engine.block_size


def choose_strategy(engine: PooledEngine) -> str:
    """Return how states get into the radix cache: `auto` buffers them if overlap or pages need it."""
    if engine.mamba_radix_cache_strategy != "auto":
        return engine.mamba_radix_cache_strategy
    if engine.disable_radix_cache:
        return "no_buffer"
    buffers = not engine.disable_overlap_schedule or engine.block_size > 1
    return "extra_buffer" if buffers else "no_buffer"


def count_states_per_request(engine: PooledEngine) -> int:
    """Return the state slots that SGLang counts for a running request when it limits their number."""
    if engine.disable_radix_cache:
        return 1
    strategy = choose_strategy(engine)
    if strategy == "no_buffer":
        return 3
    return 5 if strategy == "extra_buffer" and not engine.disable_overlap_schedule else 4


def check_pools(engine: PooledEngine) -> None:
    """Raise ConfigError for pools that SGLang refuses, or does not have."""
    if engine.swa_window is not None:
        _check_windows(engine)
    if engine.max_mamba_cache_size is not None:
        _check_states(engine)
    if not 0 < engine.mamba_full_memory_ratio < math.inf:
        raise ConfigError(
            f"mamba_full_memory_ratio must be a finite number above 0, got {engine.mamba_full_memory_ratio}"
        )
    if engine.swa_window is not None and engine.max_mamba_cache_size is not None:
        raise ConfigError(
            "swa_window contradicts max_mamba_cache_size: a model with both is not simulated; give one"
        )


def set_pools(settings: SglangSettings, engine: PooledEngine) -> None:
    """Set the core's form of the pools, and the most running requests that the states allow."""
    if engine.swa_window is not None:
        settings.swa_window = engine.swa_window
        settings.swa_tokens = count_window_tokens(engine)
    if engine.max_mamba_cache_size is not None:
        strategy = choose_strategy(engine)
        settings.mamba_slots = engine.max_mamba_cache_size
        settings.mamba_extra_buffer = strategy != "no_buffer"
        settings.mamba_lazy = strategy == "extra_buffer_lazy"
        settings.mamba_track_interval = engine.mamba_track_interval
        settings.mamba_max_states_per_path = engine.mamba_max_states_per_path
        most = engine.max_mamba_cache_size // count_states_per_request(engine)
        settings.max_running_requests = min(settings.max_running_requests, most)


def _check_windows(engine: PooledEngine) -> None:
    whole_number("swa_window", engine.swa_window, 1)
    ratio = engine.swa_full_tokens_ratio
    if not 0 < ratio <= 1:
        raise ConfigError(f"swa_full_tokens_ratio must be above 0 and at most 1, got {ratio}")
    tokens = count_window_tokens(engine)
    assert engine.swa_window is not None
    if engine.swa_window + engine.block_size >= tokens:
        raise ConfigError(
            f"swa_full_tokens_ratio: a window of {engine.swa_window} tokens and a page of {engine.block_size} do not "
            f"fit into the {tokens} tokens of the window pool, as SGLang refuses too; raise it or max_total_tokens"
        )


def _check_states(engine: PooledEngine) -> None:
    slots = whole_number("max_mamba_cache_size", engine.max_mamba_cache_size, 1)
    whole_number("mamba_track_interval", engine.mamba_track_interval, 1)
    if engine.mamba_max_states_per_path != -1:
        whole_number("mamba_max_states_per_path", engine.mamba_max_states_per_path, 1)
    needed = count_states_per_request(engine)
    if slots < needed:
        raise ConfigError(
            f"max_mamba_cache_size: {slots} slots hold no request, which needs {needed}; give at least {needed}"
        )
    if engine.mamba_radix_cache_strategy != "no_buffer" or engine.disable_radix_cache:
        return
    if engine.block_size > 1:
        raise ConfigError(
            f"mamba_radix_cache_strategy=no_buffer contradicts block_size={engine.block_size}; choose extra_buffer"
        )
    if not engine.disable_overlap_schedule:
        raise ConfigError(
            "mamba_radix_cache_strategy=no_buffer turns overlap off; give disable_overlap_schedule, or extra_buffer"
        )
