"""vLLM's metric of the cache settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from understudy.server.metrics.families import Registry
    from understudy.server.settings import ServerSettings

CACHE_INFO = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_offloading_backend": "native",
    "kv_sharing_fast_prefill": "False",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_ssm_cache_dtype": "auto",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "replayssm_buffer_len": "16",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
    **dict.fromkeys(
        (
            *("cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout", "kv_cache_memory_bytes"),
            *("kv_offloading_size", "mamba_block_size", "mamba_page_size_padded", "num_cpu_blocks"),
            *("prefix_match_unit", "skip_page_size_padded", "sliding_window"),
        ),
        "None",
    ),
}
"""Labels of cache_config_info without meaning for a simulated cache, with vLLM's defaults."""


_FLAG_OF_LABEL = {
    "gpu_memory_utilization": "gpu-memory-utilization",
    "cache_dtype": "kv-cache-dtype",
    "kv_offloading_size": "kv-offloading-size",
    "kv_offloading_backend": "kv-offloading-backend",
    "prefix_caching_hash_algo": "prefix-caching-hash-algo",
    "kv_cache_memory_bytes": "kv-cache-memory-bytes",
}


def read_cache_labels(values: dict[str, Any]) -> dict[str, str]:
    """Return the labels that flags give."""
    labels = {label: values.get(flag) for label, flag in _FLAG_OF_LABEL.items()}
    return {label: str(value) for label, value in labels.items() if value is not None}


def add_cache_info(registry: Registry, settings: ServerSettings, ranks: int) -> None:
    """Add the metric of every rank."""
    engine = settings.engine
    groups = msgspec.structs.replace(engine, max_model_len=settings.max_model_len).group_layout
    block_size = engine.block_size if groups is None else groups.block_size
    concurrency = engine.num_gpu_blocks * engine.block_size / settings.max_model_len
    tokens = engine.num_gpu_blocks * engine.block_size
    if groups is not None:
        concurrency = engine.num_gpu_blocks / groups.blocks_per_request
        tokens = int(concurrency * settings.max_model_len)
    for rank in range(ranks):
        labels = {
            **CACHE_INFO,
            "gpu_memory_utilization": str(engine.memory_share),
            **dict.fromkeys(settings.release.cache_labels, "None"),
            **settings.cache_info,
            "engine": str(rank),
            "block_size": str(block_size),
            "effective_attention_block_size": str(block_size),
            "num_gpu_blocks": str(engine.num_gpu_blocks),
            "num_gpu_blocks_override": str(engine.num_gpu_blocks),
            "enable_prefix_caching": str(engine.enable_prefix_caching),
            "kv_cache_size_tokens": str(tokens),
            "kv_cache_max_concurrency": str(concurrency),
        }
        registry.gauge("vllm:cache_config_info", "The cache's settings.", lambda: 1.0, **labels)
