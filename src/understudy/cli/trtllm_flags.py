"""Engine flags of `understudy replay --engine trtllm`, with the names and defaults of `trtllm-serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.engine_flags import Flag
from understudy.cli.own_flags import OwnFlags, names_gpu
from understudy.errors import ConfigError

if TYPE_CHECKING:
    import argparse

TRTLLM_SETTINGS = (
    Flag("max_batch_size", int, "most active requests (default: 2048)"),
    Flag("max_num_tokens", int, "tokens of a pass (default: 8192)"),
    Flag("max_seq_len", int, "most tokens of a request (default: the model's context, or 131072)"),
    Flag("enable_chunked_prefill", bool, "split prompts that exceed the tokens of a pass"),
    Flag("disable_overlap_scheduler", bool, "form a batch only when the one before has its results"),
    Flag("tokens_per_block", int, "tokens of a block (default: 32)"),
    Flag("kv_cache_max_tokens", int, "tokens of the KV cache per worker (default: 1048576)"),
    Flag("trtllm_version", str, "release to simulate (default and only one: 1.3.0rc25)", "VERSION"),
)

TRTLLM_FLAGS = OwnFlags(
    engine="trtllm",
    title="TensorRT-LLM",
    settings=TRTLLM_SETTINGS,
    others=(
        Flag(
            "kv_cache_free_gpu_memory_fraction",
            float,
            "with --gpu: share of the memory that weights leave, for the KV cache (default: 0.9)",
            "X",
        ),
        Flag("tp_size", int, "GPUs that share the model (as --tensor-parallel-size)"),
        Flag(
            "extra_llm_api_options",
            Path,
            "options by name, with kv_cache_config and scheduler_config; flags override them",
            "YAML",
        ),
    ),
    instead={
        "block_size": "--tokens_per_block",
        "num_gpu_blocks": "--kv_cache_max_tokens",
        "max_num_seqs": "--max_batch_size",
        "max_num_batched_tokens": "--max_num_tokens",
        "max_model_len": "--max_seq_len",
        "enable_prefix_caching": "kv_cache_config.enable_block_reuse in --extra_llm_api_options",
        "scheduling_policy": "scheduler_config.waiting_queue_policy in --extra_llm_api_options",
        "async_scheduling": "--disable_overlap_scheduler",
        "vllm_version": "--trtllm_version",
        "num_g2_blocks": "kv_cache_config.host_cache_size in --extra_llm_api_options",
    },
    underscores=True,
    shared=("enable_chunked_prefill",),
    aliases={
        "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
        "extra_llm_api_options": "extra-llm-api-config",
    },
)


def read_trtllm_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the flags and the file of options give, nested as in a file.

    ConfigError for flags of another engine, and for options that are not simulated.
    """
    given = TRTLLM_FLAGS.read_settings(args)
    if args.engine != "trtllm":
        return {}
    from understudy.engines.trtllm_options import OptionsFile, read_options, read_options_file

    file = (
        OptionsFile() if args.extra_llm_api_options is None else read_options_file(args.extra_llm_api_options)
    )
    engine = {**file.engine, **read_options(given)}
    settings: dict[str, Any] = {"engine": engine}
    fraction = args.kv_cache_free_gpu_memory_fraction
    if fraction is not None:
        if not names_gpu(args):
            raise ConfigError("--kv_cache_free_gpu_memory_fraction: needs a GPU; give --gpu and --model")
        engine["free_gpu_memory_fraction"] = fraction
    gpu = dict(file.gpu)
    if args.tp_size is not None:
        if args.tensor_parallel_size is not None:
            raise ConfigError("--tp_size: --tensor-parallel-size names the same setting; give one")
        if not names_gpu(args):
            raise ConfigError("--tp_size: needs a GPU; give --gpu and --model")
        gpu["tensor_parallel_size"] = args.tp_size
    if names_gpu(args):
        settings["gpu"] = {name: size for name, size in gpu.items() if getattr(args, name) is None}
        if file.kv_dtype is not None and args.kv_dtype is None:
            settings["kv_dtype"] = file.kv_dtype
    return settings
