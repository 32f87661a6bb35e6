"""Fleets whose commands and manifests tests read."""

from __future__ import annotations

from typing import Any

from understudy.report import Slo
from understudy.run.settings import ReplaySettings
from understudy.sweep.candidate import Candidate
from understudy.sweep.commands import make_commands

GPU = {"model": "Qwen3-32B", "gpu": {"name": "H200", "tensor_parallel_size": 2}}
FLEETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpu": GPU,
    "kv": {**GPU, "workers": 4, "routing": "kv", "router": {"temperature": 0.5}},
    "off": {"engine": {"enable_prefix_caching": False, "async_scheduling": False, "max_model_len": 4096}},
    "engine": {
        "engine": {
            "max_num_seqs": 32,
            "long_prefill_token_threshold": 512,
            "scheduling_policy": "priority",
            "enable_lora": True,
            "max_loras": 2,
            "watermark": 0.01,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        }
    },
    "experts": {
        "model": "Qwen3-235B-A22B",
        "gpu": {
            "name": "H200",
            "tensor_parallel_size": 2,
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
        },
    },
    "offload": {**GPU, "tiers": [{"tier": "g2", "bytes": "64GiB"}], "offload": {"mode": "vllm"}},
}
GPT_OSS = {"model": "gpt-oss-20b", "gpu": {"name": "H100"}}
ONE_GROUP = {"name": "H100", "disable_hybrid_kv_cache_manager": True}
GROUPS = [{"kind": "sliding_window", "window": 64, "block_size": 16}, {"kind": "full", "block_size": 16}]
GROUPED: dict[str, dict[str, Any]] = {
    "dense": {**GPT_OSS, "engine": {"prefix_cache_retention_interval": None}},
    "one group": {**GPT_OSS, "gpu": ONE_GROUP},
    "unit": {**GPT_OSS, "engine": {"block_size": 16, "prefix_match_unit": 8}},
    "states": {"model": "Qwen3-Next-80B-A3B", "gpu": {"name": "H200", "tensor_parallel_size": 2}},
    "long": {
        "model": "Qwen3-Next-80B-A3B",
        "gpu": {"name": "H200", "tensor_parallel_size": 2},
        "engine": {"block_size": 64},
    },
    "explicit": {"engine": {"kv_cache_groups": GROUPS, "prefix_match_unit": 8}},
}
"""Fleets of models with several KV cache groups, which vLLM 0.33 plans."""
SGLANG: dict[str, dict[str, Any]] = {
    "plain": {"engine": {"engine_type": "sglang"}},
    "gpu": {**GPU, "engine": {"engine_type": "sglang", "page_size": 64, "schedule_policy": "lpm"}},
    "more": {
        **GPU,
        "engine": {
            "engine_type": "sglang",
            "disable_radix_cache": True,
            "enable_priority_scheduling": True,
            "retraction_policy": "priority",
            "max_queued_requests": 9,
        },
    },
    "host": {**GPU, "engine": {"engine_type": "sglang"}, "tiers": [{"tier": "g2", "bytes": "64GB"}]},
}


SPLIT: dict[str, dict[str, Any]] = {
    "plain": {"disaggregation": {"prefill_workers": 2, "decode_workers": 3}},
    "gpu": {**GPU, "disaggregation": {"prefill_workers": 2, "decode_workers": 3, "link_gbps": 50}},
    "kv": {
        **GPU,
        "routing": "kv",
        "disaggregation": {"prefill_workers": 2, "decode_workers": 3, "rule": "uncached:2048", "lease_s": 60},
    },
    "pools": {
        "pools": [
            {"name": "prefill", "role": "prefill", "workers": 2, "engine": {"max_num_seqs": 8}},
            {"name": "decode", "role": "decode", "workers": 3, "engine": {}},
        ],
        "disaggregation": {},
    },
}


def candidate(settings: dict[str, Any], version: str | None = None) -> Candidate:
    if version is not None:
        settings = {**settings, "engine": {**settings.get("engine", {}), "vllm_version": version}}
    return Candidate(
        flags={},
        settings=ReplaySettings.read(None, settings, []),
        slo=Slo(ttft_ms=1),
        model=settings.get("model"),
    )


def words_of(fleet: Candidate) -> list[str]:
    return make_commands(fleet).engines[0].words
