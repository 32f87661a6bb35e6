"""Pool of a TensorRT-LLM engine from its model and the GPU that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.groups.of_model import config_of_model
from understudy.timing.capacity import BLOCKS_PLUS_MINUS
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from understudy.engines.trtllm_config import TrtllmConfig
    from understudy.tiers.gpu import GpuSettings

_ON_V2 = (
    *("deepseek_v3", "deepseek_v4", "kimi_k2", "gpt_oss", "gemma3", "gemma4", "qwen3_next", "qwen3_5"),
    *("nemotron_h", "minimax_m2", "minimax_m3"),
)
"""Starts of `model_type` whose classes choose KV cache manager V2."""
_OTHERS = ("mamba", "chunked_local", "sliding_window_mla", "circular", "rswa")
"""Layers whose memory is not simulated."""


def apply_trtllm_pools(
    gpu: GpuSettings, engine: TrtllmConfig, model: str, kv_dtype: str | None, *, has_blocks: bool
) -> tuple[TrtllmConfig, tuple[str, ...]]:
    """Set layers, bytes and pages of a model; return the engine and notes for the report.

    Windows are those of `max_attention_window` alone. ConfigError for a model that manager V2 would not run, or whose
    layers are not simulated.
    """
    check_manager(engine, model)
    layers = layers_of_model(
        model, block_size=engine.block_size, kv_dtype=kv_dtype, tensor_parallel=gpu.tensor_parallel_size
    )
    sizes = {layer.own_page_bytes for layer in layers}
    if len(sizes) != 1 or any(layer.kind in _OTHERS for layer in layers):
        raise ConfigError(
            f"model: {model} has layers whose KV TensorRT-LLM's engine does not simulate here; choose --engine vllm"
        )
    engine = msgspec.structs.replace(
        engine,
        num_layers=len(layers),
        layer_kv_bytes=sizes.pop() // engine.block_size,
        max_model_len=engine.max_model_len or known_context(model),
    )
    if has_blocks:
        return engine, ()
    if gpu.gpu_memory_utilization is not None:
        raise ConfigError(
            "gpu_memory_utilization: TensorRT-LLM takes a share of the memory that weights leave; give "
            "kv_cache_config.free_gpu_memory_fraction (--kv_cache_free_gpu_memory_fraction)"
        )
    free = gpu.with_share(1.0).kv_memory(
        model, kv_dtype, step_tokens=engine.max_num_batched_tokens, sequences=engine.max_num_seqs
    )
    sized = engine.with_memory(max_gpu_total_bytes=int(free * engine.free_gpu_memory_fraction))
    engine = msgspec.structs.replace(sized, host_cache_size=engine.host_cache_size)
    pages = engine.num_gpu_blocks
    if not gpu.is_known:
        return engine, ()
    return engine, (
        f"estimated {pages:,} KV blocks of {engine.block_size} tokens per worker "
        f"(± {round(pages * BLOCKS_PLUS_MINUS):,}); for the exact number pass {engine.exact_pool_flags} start-up log",
    )


def check_manager(engine: TrtllmConfig, model: str) -> None:
    """Raise ConfigError if the model's class chooses KV cache manager V1, which is not simulated."""
    if engine.use_kv_cache_manager_v2 is True or config_of_model(model).model_type.startswith(_ON_V2):
        return
    raise ConfigError(
        f"model: TensorRT-LLM runs {model} on KV cache manager V1 (use_kv_cache_manager_v2: auto), which is not "
        "simulated; give kv_cache_config.use_kv_cache_manager_v2: true (--set engine.use_kv_cache_manager_v2=true)"
    )
