"""The kind of engine that simulates vLLM."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.launch import LaunchCommand
from understudy.engines.kinds.terms import EngineTerms
from understudy.engines.vllm_config import VllmConfig

KIND = EngineKind(
    name="vllm",
    title="vLLM",
    config_class=VllmConfig,
    version_setting="vllm_version",
    launch=LaunchCommand(
        words=("vllm", "serve"),
        image="vllm/vllm-openai",
        tensor_parallel="tensor-parallel-size",
        data_parallel="data-parallel-size",
        memory_share="gpu-memory-utilization",
        pool="num-gpu-blocks-override",
        left_out=("kv_cache_groups",),
    ),
    terms=EngineTerms(
        storm_remedy="Use more blocks (--num-gpu-blocks), a lower --max-num-seqs or a --watermark.",
    ),
    measured_sources=("preset", "data sheet", "op tables", "aiconfigurator"),
    has_kv_cache_groups=True,
    hands_off=True,
    pulls_blocks=True,
    has_cache_curves=True,
)
