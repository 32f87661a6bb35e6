"""Choose the kernel library of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.config import Qwen3Config


def make_backend(config: Qwen3Config, device: torch.device, name: str | None = None) -> Backend:
    """Create the named backend; the default is Triton kernels on CUDA and plain torch elsewhere."""
    name = name or ("triton" if device.type == "cuda" else "reference")
    if name == "reference":
        from understudy.qwen3.reference import ReferenceBackend

        return ReferenceBackend(config, device)
    if name != "triton":
        raise ConfigError(f"backend {name!r} is not known; choose reference or triton")
    if device.type != "cuda":
        raise ConfigError("backend triton needs a CUDA device; choose reference")
    from understudy.qwen3.triton_backend import TritonBackend

    return TritonBackend(config, device)
