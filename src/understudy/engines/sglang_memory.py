"""Pools of an SGLang engine from its model and the GPU that it runs on, as SGLang 0.5.23 divides the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from understudy.engines.sglang_pools import count_window_tokens
from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.groups.of_model import config_of_model
from understudy.timing.capacity import BLOCKS_PLUS_MINUS

if TYPE_CHECKING:
    from understudy.engines.sglang_config import SglangConfig
    from understudy.groups.layer import Layer
    from understudy.tiers.gpu import GpuSettings

_HYBRID_WINDOWS = frozenset(("gpt_oss", "gemma4", "llama4"))
"""Models whose window layers have a pool of their own; others keep windows in one full pool."""
_ONE_LESS = frozenset(("gpt_oss", "gemma4"))
"""Models whose window, as SGLang counts it, leaves out the newest token."""


class _Shape(NamedTuple):
    """Bytes on one GPU, per token of the full and of the window layers and per state slot."""

    full: int
    windowed: int
    state: int
    window: int | None


def apply_sglang_pools(
    gpu: GpuSettings, engine: SglangConfig, model: str, kv_dtype: str | None, *, has_blocks: bool
) -> tuple[SglangConfig, tuple[str, ...]]:
    """Set the pools of a model whose layers differ, unless given; return the engine and notes for the report.

    ConfigError for a model whose rules are not simulated, and for one that does not fit.
    """
    shape = _find_shape(gpu, model, kv_dtype)
    if shape.window is not None and engine.swa_window is None:
        engine = msgspec.structs.replace(engine, swa_window=shape.window)
    if shape.state == 0 and has_blocks:
        return engine, _notes(engine, model, is_estimate=False)
    memory = _find_memory(gpu, engine, model, kv_dtype)
    if shape.state > 0:
        slots = engine.max_mamba_cache_size or _count_slots(engine, shape, memory)
        if slots < 1:
            raise ConfigError(
                f"mamba_full_memory_ratio: its share of {memory / 1e9:.1f} GB holds no state of {model}, of "
                f"{shape.state / 1e6:.1f} MB; raise it, or use more memory"
            )
        engine = msgspec.structs.replace(engine, max_mamba_cache_size=slots)
        memory -= slots * shape.state
    if has_blocks:
        return engine, _notes(engine, model, is_estimate=False)
    pages = int(memory // (shape.full + engine.swa_full_tokens_ratio * shape.windowed)) // engine.block_size
    if pages < 1:
        raise ConfigError(
            f"gpu.memory: {model} leaves no room for a page of KV; use more memory or more GPUs (tensor_parallel_size)"
        )
    engine = msgspec.structs.replace(engine, num_gpu_blocks=pages)
    return engine, _notes(engine, model, is_estimate=gpu.is_known)


def _find_shape(gpu: GpuSettings, model: str, kv_dtype: str | None) -> _Shape:
    layers = layers_of_model(model, block_size=1, kv_dtype=kv_dtype, tensor_parallel=gpu.tensor_parallel_size)
    states = sum(layer.own_page_bytes for layer in layers if layer.kind == "mamba")
    windows = [layer for layer in layers if layer.kind in ("sliding_window", "chunked_local")]
    others = [layer for layer in layers if layer.kind in ("sliding_window_mla", "circular", "rswa")]
    full = [layer for layer in layers if layer.is_full and layer not in others]
    if others or not full or (states and windows):
        raise ConfigError(
            f"model: {model} has layers whose pools SGLang's engine does not simulate here; choose --engine vllm"
        )
    kind = config_of_model(model).model_type
    if not windows:
        return _Shape(_bytes_of(full), 0, states, None)
    if kind not in _HYBRID_WINDOWS or gpu.disable_hybrid_kv_cache_manager:
        return _Shape(_bytes_of(full) + _bytes_of(windows), 0, states, None)
    window = windows[0].window or windows[0].chunk or 0
    return _Shape(_bytes_of(full), _bytes_of(windows), states, window - (kind in _ONE_LESS))


def _bytes_of(layers: list[Layer]) -> int:
    return sum(layer.own_page_bytes for layer in layers)


def _find_memory(gpu: GpuSettings, engine: SglangConfig, model: str, kv_dtype: str | None) -> int:
    if not gpu.is_known:
        raise ConfigError(
            f"max_mamba_cache_size: the state slots of {model} follow from the GPU's memory; give --gpu, or the slots"
        )
    return gpu.with_share(engine.memory_share).kv_memory(
        model, kv_dtype, step_tokens=engine.max_num_batched_tokens, sequences=engine.max_num_seqs
    )


def _count_slots(engine: SglangConfig, shape: _Shape, memory: int) -> int:
    """Return the slots that SGLang gives to states: for the running requests without a cache, else by memory."""
    if engine.disable_radix_cache and engine.max_num_seqs is not None:
        return engine.max_num_seqs
    share = engine.mamba_full_memory_ratio
    budget = memory * share / (1 + share)
    return int((budget - shape.state) // shape.state)  # one slot is padding


def _notes(engine: SglangConfig, model: str, *, is_estimate: bool) -> tuple[str, ...]:
    tokens = engine.num_gpu_blocks * engine.block_size
    pools = f"{tokens:,} tokens of full KV"
    if engine.swa_window is not None:
        pools += f", {count_window_tokens(engine):,} of windows of {engine.swa_window}"
    if engine.max_mamba_cache_size is not None:
        pools += f", {engine.max_mamba_cache_size:,} states"
    error = (
        f" (estimated, ± {round(tokens * BLOCKS_PLUS_MINUS):,}; for the exact number pass {engine.exact_pool_flags} "
        "start-up log)"
        if is_estimate
        else ""
    )
    return (f"pools of {model} per worker: {pools}{error}",)
