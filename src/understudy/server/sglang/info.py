"""Descriptions that an SGLang server gives: its model, its settings, its load."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from understudy.server.push.settings import BOOTSTRAP_PORT
from understudy.server.tokenizer.builtin import BuiltinTokenizer

if TYPE_CHECKING:
    from understudy.server.worker import Worker

VERSION = "0.5.23"


def list_models(worker: Worker) -> dict[str, Any]:
    """Return the model cards of `/v1/models`."""
    return {"object": "list", "data": [describe_card(worker, name) for name in worker.settings.names]}


def describe_card(worker: Worker, name: str) -> dict[str, Any]:
    """Return the card of one model."""
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": worker.settings.max_model_len,
    }


def model_info(worker: Worker) -> dict[str, Any]:
    """Return the answer of `/model_info`."""
    settings = worker.settings
    return {
        "model_path": settings.model,
        "served_model_name": settings.names[0],
        "tokenizer_path": settings.tokenizer or BuiltinTokenizer.name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": worker.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": settings.tool_call_parser,
        "disaggregation_mode": _side(worker),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": None,
    }


def _side(worker: Worker) -> str:
    """Return the worker's side as SGLang names it."""
    return "null" if worker.settings.push is None else worker.settings.push.role


def server_info(worker: Worker) -> dict[str, Any]:
    """Return the answer of `/server_info`: SGLang's settings by name, its limits, and the state of each rank."""
    settings, engine = worker.settings, worker.settings.engine
    own = {name: getattr(engine, name) for name in engine.__struct_fields__ if name in _NAMED}
    pool = engine.num_gpu_blocks * engine.block_size
    most = min(settings.max_model_len, pool) - 1
    given: dict[str, Any] = {
        "model_path": settings.model,
        "tokenizer_path": settings.tokenizer or BuiltinTokenizer.name,
        "served_model_name": settings.names[0],
        "host": settings.host,
        "port": settings.port,
        "context_length": settings.max_model_len,
        "page_size": engine.block_size,
        "max_total_tokens": pool,
        "max_running_requests": engine.max_num_seqs,
        **own,
        "enable_hierarchical_cache": bool(settings.tiers.tiers),
        "stream_interval": settings.stream_interval,
        "incremental_streaming_output": settings.incremental_streaming_output,
        "enable_cache_report": settings.enable_prompt_tokens_details,
        "enable_metrics": True,
        "random_seed": settings.seed,
        "weight_version": worker.weight_version,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": settings.data_parallel_size,
        "disaggregation_mode": _side(worker),
        "disaggregation_bootstrap_port": BOOTSTRAP_PORT
        if settings.push is None
        else settings.push.bootstrap_port,
        "kv_events_config": settings.kv_events_config or None,
    }
    return {
        **given,
        "status": "ready",
        "max_total_num_tokens": pool,
        "max_req_input_len": most - 5,
        "internal_states": [
            {
                **given,
                "effective_max_running_requests_per_dp": engine.max_num_seqs,
                "last_gen_throughput": 0.0,
                "memory_usage": {"token_capacity": pool},
            }
            for _ in worker.cores
        ],
        "version": VERSION,
        "frontend": "python",
    }


_NAMED = frozenset(
    (
        *("max_prefill_tokens", "chunked_prefill_size", "prefill_max_requests", "schedule_policy"),
        *("schedule_conservativeness", "enable_mixed_chunk", "disable_radix_cache", "max_queued_requests"),
        *("disable_overlap_schedule", "radix_eviction_policy", "enable_priority_scheduling"),
        *("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold"),
        *("disable_priority_preemption", "retraction_policy", "hicache_write_policy"),
    )
)
"""Settings of the engine that have SGLang's names."""


def describe_loads(worker: Worker) -> dict[str, Any]:
    """Return the answer of `/v1/loads`, without the sections of optional features."""
    loads = []
    for rank, core in enumerate(worker.cores):
        used = core.active_blocks * core.block_size
        loads.append(
            {
                "dp_rank": rank,
                "timestamp": time.time(),
                "num_running_reqs": core.num_running,
                "num_waiting_reqs": core.num_waiting,
                "num_total_reqs": core.num_running + core.num_waiting,
                "num_used_tokens": used,
                "num_total_tokens": used,
                "max_total_num_tokens": core.num_blocks * core.block_size,
                "token_usage": core.usage,
            }
        )
    return {"timestamp": time.time(), "version": VERSION, "dp_rank_count": len(loads), "loads": loads}
