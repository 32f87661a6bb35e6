"""The kind of engine that simulates vLLM."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.vllm_config import VllmConfig

KIND = EngineKind(
    name="vllm",
    title="vLLM",
    config_class=VllmConfig,
    version_setting="vllm_version",
    has_kv_cache_groups=True,
    hands_off=True,
    has_cache_curves=True,
)
