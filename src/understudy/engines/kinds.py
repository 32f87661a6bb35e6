"""Kinds of engines, by the name that settings give in `engine_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig

KINDS: dict[str, type[EngineConfig]] = {"vllm": VllmConfig, "sglang": SglangConfig}

DEFAULT_ENGINE: EngineConfig = VllmConfig()


def read_engine(settings: dict[str, Any]) -> EngineConfig:
    """Read the settings of an engine by name; `engine_type` names its kind (default: vllm)."""
    kind = settings.get("engine_type")
    return KINDS.get(kind.lower() if isinstance(kind, str) else "vllm", VllmConfig).from_dict(settings)
