"""Qwen3 in PyTorch on the KV manager: a real engine next to the simulated ones. Needs the extra `[torch]`.

The first access to one of these names imports PyTorch; reading recorded steps does not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.qwen3.build import build_engine
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.engine import Engine
    from understudy.qwen3.options import EngineOptions
    from understudy.qwen3.request import Output, Request
    from understudy.qwen3.sampling import GREEDY, SamplingParams

__all__ = [
    "GREEDY",
    "Engine",
    "EngineOptions",
    "Output",
    "Qwen3Config",
    "Request",
    "SamplingParams",
    "build_engine",
]

_HOMES = {
    "EngineOptions": "options",
    "build_engine": "build",
    "Qwen3Config": "config",
    "Engine": "engine",
    "Output": "request",
    "Request": "request",
    "GREEDY": "sampling",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as error:  # pragma: no cover - a message for users
        raise ImportError("understudy.qwen3 needs PyTorch; pip install 'understudy[torch]'") from error
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
