"""Build vLLM's own scheduler for a model that consists of a config file only."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.kv_events import KVEventsConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from model.vllm_config import Config

if TYPE_CHECKING:
    from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 131072,
    "torch_dtype": "float32",
}
"""Nothing is computed; the vocabulary holds every token of a scenario."""
DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in fields(Config) if not field.name.startswith("aic_")},
    "prefill_schedule_interval": 1,
}
"""Defaults of a scenario's settings."""
ELSEWHERE = (
    *("block_size", "num_blocks", "enable_prefix_caching", "max_loras"),
    *("groups", "prefix_cache_retention_interval", "prefix_match_unit"),
)
"""Settings that are not part of vLLM's scheduler config."""


def complete(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return the scenario's settings with defaults; only the default `max_num_seqs` is lowered to the budget."""
    config = {**DEFAULTS, **scenario["config"]}
    if "max_num_seqs" not in scenario["config"]:
        config["max_num_seqs"] = min(config["max_num_seqs"], config["max_num_batched_tokens"])
    return config


def real_scheduler(
    config: dict[str, Any], model: Path, *, method: str | None = None, k: int = 0, transfer: Any = None
) -> Any:
    """Build the scheduler that a scenario describes.

    `model` is a folder for the model's config. `method` and `k`: speculation. `transfer`: vLLM's KV transfer config.
    """
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    settings = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"]
        ),
        scheduler_config=SchedulerConfig(
            **{**_scheduler_settings(config), "enable_chunked_prefill": True}, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(
            block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=config["enable_prefix_caching"] or transfer is not None, publisher="null"
        ),
    )
    # VllmConfig would refuse or overrule the following settings, which the scheduler can do.
    for name in ("async_scheduling", "enable_chunked_prefill"):
        setattr(settings.scheduler_config, name, config[name])
    if config["max_loras"] is not None:
        settings.lora_config = LoRAConfig(max_loras=config["max_loras"])
    if method is not None:
        settings.speculative_config = _speculation(settings, method, k)
    settings.kv_transfer_config = transfer
    settings.cache_config.num_gpu_blocks = config["num_blocks"]
    make = AsyncScheduler if config["async_scheduling"] else Scheduler
    if "groups" in config:
        from exact.groups import build_groups

        cache, scheduler_block, hash_block = build_groups(config, settings)
        return make(
            vllm_config=settings,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(settings),
            block_size=scheduler_block,
            hash_block_size=hash_block,
        )
    attention = FullAttentionSpec(
        block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    blocks = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    return make(
        vllm_config=settings,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(settings),
        block_size=config["block_size"],
    )


def _scheduler_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of vLLM's scheduler config; a release may lack those that have their defaults."""
    known = SchedulerConfig.__dataclass_fields__  # also those of its constructor only
    settings = {name: value for name, value in config.items() if name not in ELSEWHERE}
    for name in [name for name in settings if name not in known]:
        if settings.pop(name) != DEFAULTS.get(name):
            raise ValueError(f"{name}: this release has no such setting")
    return settings


def _speculation(settings: Any, method: str, k: int) -> Any:
    """Build a speculative config; methods with a draft model get none, because the scheduler does not use it."""
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=k,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=settings.model_config,
        target_parallel_config=settings.parallel_config,
    )
    config.method = method
    return config
