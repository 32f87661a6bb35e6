"""The real scheduler, of a model that is no more than its config."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
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
"""Nothing of it is computed; its vocabulary holds every token of a scenario."""
DEFAULTS = {field.name: field.default for field in fields(Config) if not field.name.startswith("aic_")}
"""Of a scenario's settings."""
ELSEWHERE = ("block_size", "num_blocks", "enable_prefix_caching", "max_loras")
"""Those that vLLM's scheduler config has not."""


def real_scheduler(config: dict[str, Any], model: Path) -> Any:
    """As a scenario configures it; `model` is a folder, for the config of one."""
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    asked = {name: value for name, value in config.items() if name not in ELSEWHERE}
    settings = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"]
        ),
        scheduler_config=SchedulerConfig(
            **{**asked, "enable_chunked_prefill": True}, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(
            block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=config["enable_prefix_caching"], publisher="null"
        ),
    )
    for name in (
        "async_scheduling",
        "enable_chunked_prefill",
    ):  # it would refuse or overrule what a scheduler can do
        setattr(settings.scheduler_config, name, config[name])
    settings.cache_config.num_gpu_blocks = config["num_blocks"]
    attention = FullAttentionSpec(
        block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    blocks = KVCacheConfig(
        num_blocks=config["num_blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    return (AsyncScheduler if config["async_scheduling"] else Scheduler)(
        vllm_config=settings,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(settings),
        block_size=config["block_size"],
    )
