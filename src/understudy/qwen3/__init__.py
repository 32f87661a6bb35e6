"""Qwen3 in PyTorch on the KV manager: a real engine beside the simulated ones. Needs the extra `[torch]`."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:  # pragma: no cover - told to a person
    raise ImportError("understudy.qwen3 needs PyTorch: pip install 'understudy[torch]'") from error

from understudy.qwen3.build import EngineOptions, build_engine
from understudy.qwen3.config import Qwen3Config
from understudy.qwen3.engine import Engine
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
