"""`understudy serve MODEL --engine qwen3`: build a server with the real engine from flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.qwen3.build import build_engine
from understudy.qwen3.config import find_config
from understudy.qwen3.options import EngineOptions
from understudy.qwen3.serving import Qwen3Serving
from understudy.server.kv_events import KvEventsConfig
from understudy.server.server import Runtime, Server
from understudy.server.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from understudy.qwen3.build import Progress
    from understudy.server.flags.plan import ServePlan

_SIMULATED = (
    *("clock-speed", "response-mode", "response-file", "time-to-first-token", "inter-token-latency", "vllm-version"),
    *("set", "fake-metrics", "lora-modules"),
)  # fmt: skip
"""Flags of simulated engines only."""


def open_server(plan: ServePlan, progress: Progress | None = None) -> tuple[Server, Qwen3Serving]:
    """Build a server that does not listen yet, and its engine, to be closed last. ConfigError names a wrong flag."""
    values, settings = plan.line.values, plan.settings
    for name in _SIMULATED:
        if values.get(name) not in (None, []):
            raise ConfigError(f"--{name} is for a simulated engine; leave it out with --engine qwen3")
    if settings.data_parallel_size != 1:
        raise ConfigError("--engine qwen3 is one engine; leave out --data-parallel-size")
    tokenizer = open_tokenizer(settings.tokenizer)
    config = find_config(settings.model)
    options = _options(values, settings)
    engine = build_engine(settings.model, options, progress)
    manager = engine.scheduler.manager
    blocks, size = manager.max_request_blocks, manager.layout.page_size
    most = min(engine.scheduler.config.max_positions, blocks * size)
    shown = msgspec.structs.replace(
        settings.engine, num_gpu_blocks=blocks, block_size=size, max_model_len=most
    )
    cache = {**settings.cache_info, "gpu_memory_utilization": str(options.memory_utilization)}
    settings = msgspec.structs.replace(settings, engine=shown, max_model_len=most, cache_info=cache)
    serving = Qwen3Serving(engine, config, frozenset(config.eos_token_ids))
    return Server(settings, Runtime(tokenizer=tokenizer, given=serving)), serving


def _options(values: dict[str, Any], settings: Any) -> EngineOptions:
    engine = settings.engine
    blocks = values.get("num-gpu-blocks-override") or values.get("num-gpu-blocks")
    dtype = str(values.get("dtype") or "auto")
    return EngineOptions(
        device=values.get("device"),
        dtype={"float": "float32", "half": "float16", "auto": None}.get(dtype, dtype),
        backend=values.get("backend"),
        page_size=engine.block_size,
        num_blocks=blocks,
        memory_utilization=values.get("gpu-memory-utilization") or EngineOptions().memory_utilization,
        max_num_seqs=engine.max_num_seqs if values.get("max-num-seqs") else 256,
        max_batched_tokens=values.get("max-num-batched-tokens") or 2048,
        max_model_len=settings.max_model_len if values.get("max-model-len") else None,
        prefix_caching=engine.enable_prefix_caching,
        random_weights=values.get("random-weights"),
        cuda_graphs=not values.get("enforce-eager"),
        seed=settings.seed,
        events=KvEventsConfig.read(settings.kv_events_config).publishes,
        tiers=settings.tiers if settings.tiers.tiers else None,
        tensor_parallel_size=values.get("tensor-parallel-size") or 1,
    )
