"""The operations of a layer, behind which a kernel library stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from understudy.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from understudy.qwen3.batch import Batch
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.weights import Layer


class Backend(Protocol):
    """Pure functions, but for `store`, which writes the rows of this step and nothing else."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x` times the transpose of `weight` [out, in]."""

    def normed_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`weight` applied to the RMS norm of `x + residual` (without `x`: of `residual`), and that sum."""

    def normed_gated(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the fused matrix of the MLP: SiLU of the first half of the result times the second."""

    def store(
        self, qkv: torch.Tensor, layer: Layer, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate the heads, write K and V to their pages; returns the queries [tokens, heads, dim]."""

    def attend(
        self, queries: torch.Tensor, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention over each request's pages: a query at position t sees keys 0..t. [tokens, heads * dim]."""

    def likeliest(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """The first of the largest of every row [rows, vocabulary], into `out` [rows] of int64."""


def rotary_tables(config: Qwen3Config, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [position, head_dim / 2] in float32, for every position that the model has."""
    import torch

    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def make_backend(config: Qwen3Config, device: torch.device, name: str | None = None) -> Backend:
    """The kernels on CUDA, plain torch elsewhere, or the one that is named."""
    name = name or ("triton" if device.type == "cuda" else "reference")
    if name == "reference":
        from understudy.qwen3.reference import ReferenceBackend

        return ReferenceBackend(config, device)
    if name != "triton":
        raise ConfigError(f"backend {name!r} is not one of reference, triton")
    if device.type != "cuda":
        raise ConfigError("backend triton needs a CUDA device; choose reference")
    from understudy.qwen3.triton_backend import TritonBackend

    return TritonBackend(config, device)
