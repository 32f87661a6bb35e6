"""Names of the engines that step times were measured with."""

from __future__ import annotations

from understudy.errors import ConfigError

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""Titles of the engines by their short names."""
_SPELLINGS = {"tensorrtllm": "trtllm", "trt": "trtllm", "tensorrt": "trtllm"}


def find_engine_name(name: str) -> str:
    """Return the short name of an engine. ConfigError for one whose times are not known."""
    key = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    found = _SPELLINGS.get(key, key)
    if found not in ENGINES:
        raise ConfigError(f"backend {name!r} is not known; known are {', '.join(ENGINES)}")
    return found


def find_timed_engine(kind: str) -> str:
    """Return the engine whose presets a kind of simulated engine has: its own, or vLLM's for one without."""
    return kind if kind in ENGINES else "vllm"
