"""The kind of engine that simulates TensorRT-LLM."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.launch import LaunchCommand
from understudy.engines.kinds.terms import EngineTerms
from understudy.engines.trtllm_config import TrtllmConfig
from understudy.engines.trtllm_pools import apply_trtllm_pools

_FEWER_COPIES = "Try a larger KV cache (kv_cache_config.max_tokens), or a lower --max_batch_size."

KIND = EngineKind(
    name="trtllm",
    title="TensorRT-LLM",
    config_class=TrtllmConfig,
    version_setting="trtllm_version",
    metrics="trtllm",
    apply_pools=apply_trtllm_pools,
    launch=LaunchCommand(
        words=("trtllm-serve",),
        image="nvcr.io/nvidia/tensorrt-llm/release",
        tag_is_release=True,
        tensor_parallel="tp_size",
        data_parallel="data_parallel_size",
        memory_share="kv_cache_free_gpu_memory_fraction",
        pool="kv_cache_config.max_tokens",
        names={
            "max_num_seqs": "max_batch_size",
            "max_num_batched_tokens": "max_num_tokens",
            "max_model_len": "max_seq_len",
            "enable_chunked_prefill": "enable_chunked_prefill",
            "free_gpu_memory_fraction": "kv_cache_free_gpu_memory_fraction",
            "block_size": "kv_cache_config.tokens_per_block",
            "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
            "block_reuse_policy": "kv_cache_config.block_reuse_config.policy",
            **{
                name: f"kv_cache_config.{name}"
                for name in (
                    *("enable_partial_reuse", "max_util_for_resume", "host_cache_size", "disk_cache_size"),
                    *("max_attention_window", "avg_seq_len", "pool_ratio", "enable_swa_scratch_reuse"),
                    *("use_kv_cache_manager_v2", "event_buffer_max_size", "kv_cache_event_hash_algo"),
                )
            },
            "waiting_queue_policy": "scheduler_config.waiting_queue_policy",
            "capacity_scheduler_policy": "scheduler_config.capacity_scheduler_policy",
            **{
                name: name
                for name in (
                    *("disable_overlap_scheduler", "enable_prefix_aware_scheduling"),
                    *("batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"),
                    *("enable_iter_perf_stats", "iter_stats_max_iterations"),
                )
            },
        },
        left_out=("num_layers", "layer_kv_bytes", "host_gbps", "disk_gbps"),
    ),
    terms=EngineTerms(
        memory="kv_cache_config.max_tokens or --kv_cache_free_gpu_memory_fraction",
        requests="--max_batch_size",
        step="--max_num_tokens",
        pool_setting="set engine.num_gpu_blocks",
        more_memory="more KV cache",
        requeued="suspensions",
        usage="KV cache usage",
        storm_remedy="Use a larger KV cache (kv_cache_config.max_tokens), a host level "
        "(kv_cache_config.host_cache_size), or a lower --max_batch_size.",
        step_cause="some steps also compute prompts, or decode for more requests",
        tier_remedy=_FEWER_COPIES,
        write_through_remedy=_FEWER_COPIES,
        link_remedy=_FEWER_COPIES,
    ),
    steps_apart="attention with data parallelism (enable_attention_dp) is not simulated",
    shortens_requests=True,
    runs_measured_rows=False,
    last_token_switch="disable_overlap_scheduler",
)
