"""Interface of a layer's operations, implemented by a kernel library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from understudy.qwen3.batch import Batch
    from understudy.qwen3.weights import Layer


class Backend(Protocol):
    """Pure functions, except `store`, which writes only the rows of this step."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x` by the transpose of `weight` [out, in]."""

    def normed_linear(
        self, x: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `weight` applied to the RMS norm of `x + residual` (without `x`: of `residual`), and that sum."""

    def normed_gated(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return SiLU of the first half times the second half of `normed_linear` with the MLP's fused matrix."""

    def store(
        self, qkv: torch.Tensor, layer: Layer, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotate the heads, write K and V to their pages, and return the queries [tokens, heads, dim]."""

    def attend(
        self, queries: torch.Tensor, batch: Batch, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention over each request's pages: a query at t sees keys 0..t. [tokens, heads * dim]."""

    def argmax(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Write the index of the first maximum of every row [rows, vocabulary] to `out` [rows] of int64."""
