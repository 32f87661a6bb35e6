"""The network as pure functions over views: tokens, views, buffer and layout in, logits out.

They allocate no KV and change no request. Who calls them has scheduled the step before, and applies it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from understudy.errors import InvalidArgument
from understudy.qwen3.batch import Batch, Chunk, Decode

if TYPE_CHECKING:
    from understudy.qwen3.backend import Backend
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.weights import Weights

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks, in place where it can."""


def alone(x: torch.Tensor) -> torch.Tensor:
    """The reduction of a single rank."""
    return x


def batch_prefill(
    weights: Weights,
    chunks: Sequence[Chunk],
    buffer: KvBuffer,
    backend: Backend,
    *,
    reduce: Reduce = alone,
    echo: bool = False,
) -> torch.Tensor:
    """Logits behind the last token of each chunk, or with `echo` behind every token."""
    return forward(
        weights, Batch.build(chunks, (), buffer.pages.device, all_logits=echo), buffer, backend, reduce
    )


def batch_decode(
    weights: Weights, decodes: Sequence[Decode], buffer: KvBuffer, backend: Backend, *, reduce: Reduce = alone
) -> torch.Tensor:
    """Logits behind each token."""
    return forward(weights, Batch.build((), decodes, buffer.pages.device), buffer, backend, reduce)


def unified_step(
    weights: Weights,
    chunks: Sequence[Chunk],
    decodes: Sequence[Decode],
    buffer: KvBuffer,
    backend: Backend,
    *,
    reduce: Reduce = alone,
) -> torch.Tensor:
    """Logits behind each chunk, then behind each decode. Needs at least one of each: B9, echo has no place here."""
    if not chunks or not decodes:
        raise InvalidArgument("a unified step has chunks and decodes; call batch_prefill or batch_decode")
    return forward(weights, Batch.build(chunks, decodes, buffer.pages.device), buffer, backend, reduce)


def forward(
    weights: Weights, batch: Batch, buffer: KvBuffer, backend: Backend, reduce: Reduce = alone
) -> torch.Tensor:
    """One pass. In each layer the rows of this step are written before any row is read."""
    residual = weights.embed[batch.tokens]
    x = backend.norm(residual, weights.layers[0].input_norm)
    for index, layer in enumerate(weights.layers):
        keys, values = buffer.layer(index)
        queries = backend.store(backend.linear(x, layer.qkv), layer, batch, keys, values)
        attended = backend.attend(queries, batch, keys, values)
        x, residual = backend.add_norm(reduce(backend.linear(attended, layer.out)), residual, layer.mlp_norm)
        gated = backend.gated(x, layer.gate_up)
        last = index + 1 == len(weights.layers)
        norm = weights.norm if last else weights.layers[index + 1].input_norm
        x, residual = backend.add_norm(reduce(backend.linear(gated, layer.down)), residual, norm)
    if len(batch.logit_rows) != len(x):
        x = x[batch.logit_rows]
    return backend.linear(x, weights.head)
