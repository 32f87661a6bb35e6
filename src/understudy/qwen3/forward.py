"""The network as pure functions from tokens, views and buffer to logits.

They allocate no KV and change no request. The caller schedules the step before and applies it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from understudy.errors import InvalidArgument
from understudy.qwen3.batch import Batch, Chunk, Decode

if TYPE_CHECKING:
    from understudy.qwen3.backend import Backend
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.weights import Weights

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Function that sums a tensor over the ranks, in place if possible."""


def no_reduce(x: torch.Tensor) -> torch.Tensor:
    """Return `x`: the reduction of a single rank."""
    return x


def batch_prefill(
    weights: Weights,
    chunks: Sequence[Chunk],
    buffer: KvBuffer,
    backend: Backend,
    *,
    reduce: Reduce = no_reduce,
    echo: bool = False,
) -> torch.Tensor:
    """Return logits after the last token of each chunk, or with `echo` after every token."""
    return forward(
        weights, Batch.build(chunks, (), buffer.pages.device, all_logits=echo), buffer, backend, reduce
    )


def batch_decode(
    weights: Weights,
    decodes: Sequence[Decode],
    buffer: KvBuffer,
    backend: Backend,
    *,
    reduce: Reduce = no_reduce,
) -> torch.Tensor:
    """Return logits after each token."""
    return forward(weights, Batch.build((), decodes, buffer.pages.device), buffer, backend, reduce)


def unified_step(
    weights: Weights,
    chunks: Sequence[Chunk],
    decodes: Sequence[Decode],
    buffer: KvBuffer,
    backend: Backend,
    *,
    reduce: Reduce = no_reduce,
) -> torch.Tensor:
    """Return logits after each chunk, then after each decode. Needs at least one of each; no echo (B9)."""
    if not chunks or not decodes:
        raise InvalidArgument("a unified step has chunks and decodes; call batch_prefill or batch_decode")
    return forward(weights, Batch.build(chunks, decodes, buffer.pages.device), buffer, backend, reduce)


def forward(
    weights: Weights, batch: Batch, buffer: KvBuffer, backend: Backend, reduce: Reduce = no_reduce
) -> torch.Tensor:
    """Run one pass and return logits. In each layer, all rows of the step are written before any is read."""
    residual = F.embedding(batch.tokens, weights.embed)
    x: torch.Tensor | None = None
    for index, layer in enumerate(weights.layers):
        keys, values = buffer.layer(index)
        qkv, residual = backend.normed_linear(x, residual, layer.input_norm, layer.qkv)
        queries = backend.store(qkv, layer, batch, keys, values)
        attended = backend.attend(queries, batch, keys, values)
        x = reduce(backend.linear(attended, layer.out))
        gated, residual = backend.normed_gated(x, residual, layer.mlp_norm, layer.gate_up)
        x = reduce(backend.linear(gated, layer.down))
    assert x is not None
    if len(batch.logit_rows) != len(x):
        x, residual = x[batch.logit_rows], residual[batch.logit_rows]
    return backend.normed_linear(x, residual, weights.norm, weights.head)[0]
