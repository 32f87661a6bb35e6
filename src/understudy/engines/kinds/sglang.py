"""The kind of engine that simulates SGLang."""

from __future__ import annotations

from understudy.engines.kinds.kind import EngineKind
from understudy.engines.sglang_config import SglangConfig

KIND = EngineKind(
    name="sglang",
    title="SGLang",
    config_class=SglangConfig,
    version_setting="sglang_version",
    event_producer="sglang",
    metrics="sglang",
    sizes_pool_in_tokens=True,
    steps_apart="SGLang's way to it (DP attention) is not simulated",
    shortens_requests=True,
    answers_full_queue=True,
    last_token_switch="disable_overlap_schedule",
)
