"""TensorRT-LLM's options as users write them: `extra_llm_api_options` and the flags of `trtllm-serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.checks import whole_number
from understudy.context_parallel import CONTEXT_PARALLEL, refuse_context_parallel
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TRTLLM_NAMES = {
    "tokens_per_block": "block_size",
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "enable_block_reuse": "enable_prefix_caching",
    "kv_cache_max_tokens": "max_tokens",
}
"""TensorRT-LLM's names of settings that engines of every kind have."""

SECTIONS = ("kv_cache_config", "scheduler_config")
"""Mappings whose keys are settings of the engine."""

WITHOUT_EFFECT = frozenset(
    {
        *(
            "cuda_graph_config",
            "print_iter_log",
            "return_perf_metrics",
            "perf_metrics_max_requests",
            "stream_interval",
            "backend",
        ),
        *("dtype", "disk_cache_path", "copy_on_partial_reuse", "trust_remote_code"),
    }
)
"""Options that change no schedule."""

NOT_SIMULATED = {
    "speculative_config": "speculation is not simulated",
    "cache_transceiver_config": "disaggregation is not simulated",
    "disaggregated_params": "disaggregation is not simulated",
    "enable_attention_dp": "attention with data parallelism is not simulated",
    "attention_dp_config": "attention with data parallelism is not simulated",
    "use_python_scheduler": "the scheduler of KV cache manager V1 is not simulated",
    "sink_token_length": "sink tokens are not simulated",
    "enable_kv_pool_rebalance": "rebalancing of pools is not simulated",
    "disk_prefetch_num_reqs": "prefetching from disk is not simulated",
    "secondary_offload_min_priority": "it is an option of KV cache manager V1",
    "lora_config": "pages of adapters are not simulated",
    "sparse_attention_config": "sparse attention is not simulated",
}
"""Options that are refused unless they are off, and why."""


class OptionsFile(msgspec.Struct, frozen=True):
    """Options of a file: settings of the engine, and those of its memory and GPUs."""

    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    kv_dtype: str | None = None
    """Type of the KV cache; None: the model's own."""
    gpu: dict[str, int] = msgspec.field(default_factory=dict)
    """GPUs that share the model, and groups of its experts, by the names of `gpu`."""


def read_options_file(path: Path) -> OptionsFile:
    """Read a file of `extra_llm_api_options`. ConfigError names what is wrong, or is not simulated."""
    from understudy.yaml_text import read_yaml

    content = read_yaml(path)
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: expected options by name at the top level")
    options = {str(name): value for name, value in (content or {}).items()}
    memory = options.get("kv_cache_config")
    dtype = memory.get("dtype") if isinstance(memory, dict) else None
    gpu: dict[str, int] = {}
    for name, ours in _PARALLEL.items():
        if options.get(name) is not None:
            gpu[ours] = whole_number(name, options[name], 1)
    try:
        engine = read_options(options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    kv_dtype = None if dtype in (None, "auto") else str(dtype)
    return OptionsFile(engine, kv_dtype, gpu)


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings behind the options. ConfigError names what is given twice, or is not simulated."""
    options = dict(given)
    for section in SECTIONS:
        inner = options.pop(section, None)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise ConfigError(f"{section}: must be a mapping, got {inner!r}")
        for name, value in inner.items():
            _put(options, str(name), value, section)
    reuse = options.pop("block_reuse_config", None)
    if reuse is not None:
        _put(options, "block_reuse_policy", _reuse_policy(reuse), "block_reuse_config")
    for name, reason in NOT_SIMULATED.items():
        if options.pop(name, None) not in (None, False, 0):
            raise ConfigError(f"{name}: {reason}; leave it out")
    _check_parallel(options)
    if options.pop("context_chunking_policy", None) not in (None, *_CHUNKING):
        raise ConfigError(f"context_chunking_policy: must be one of {', '.join(_CHUNKING)}")
    for name in WITHOUT_EFFECT:
        options.pop(name, None)
    out: dict[str, Any] = {}
    for name, value in options.items():
        ours = TRTLLM_NAMES.get(name, name)
        if ours in out:
            raise ConfigError(f"{name}: {ours} names the same setting; give one")
        out[ours] = value
    return {name: value for name, value in out.items() if value is not None or name == "host_cache_size"}


_PARALLEL = {
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tensor_parallel_size"),
    **dict.fromkeys(("moe_expert_parallel_size", "ep_size"), "expert_parallel_size"),
}
_CHUNKING = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")


def _put(options: dict[str, Any], name: str, value: object, section: str) -> None:
    if name in options:
        raise ConfigError(f"{section}.{name}: {name} is given as well; give one")
    options[name] = value


def _reuse_policy(reuse: object) -> object:
    policy = reuse.get("policy", "all_reusable") if isinstance(reuse, dict) else reuse
    if policy == "per_conversation":
        raise ConfigError(
            "block_reuse_config.policy: per_conversation is not simulated; give all_reusable or per_request"
        )
    return policy


def _check_parallel(options: dict[str, Any]) -> None:
    for name in ("pipeline_parallel_size", "pp_size"):
        if options.pop(name, 1) not in (None, 1):
            raise ConfigError(f"{name}: pipeline parallelism is not simulated; leave it out")
    refuse_context_parallel(options)
    for name in (*CONTEXT_PARALLEL, *_PARALLEL):
        options.pop(name, None)  # step times have it
