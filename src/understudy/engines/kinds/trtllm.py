"""The kind of engine that simulates TensorRT-LLM."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.terms import EngineTerms
from understudy.engines.trtllm_config import TrtllmConfig

_FEWER_COPIES = "Try a larger KV cache (kv_cache_config.max_tokens), or a lower --max_batch_size."

KIND = EngineKind(
    name="trtllm",
    title="TensorRT-LLM",
    config_class=TrtllmConfig,
    version_setting="trtllm_version",
    terms=EngineTerms(
        memory="kv_cache_config.max_tokens or --kv_cache_free_gpu_memory_fraction",
        requests="--max_batch_size",
        step="--max_num_tokens",
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
    last_token_switch="disable_overlap_scheduler",
)
