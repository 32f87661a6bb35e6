"""Norm and rotate queries and keys of the fused projection, and write K and V to their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


# Slices of one array have any alignment: compile one kernel for all.
@triton.jit(do_not_specialize_on_alignment=["positions", "owners", "page_ids", "page_indptr"])
def _store(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cos, sin, positions, owners, page_ids, page_indptr, queries, keys, values, eps,
    page_stride, row_stride, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * together
    half: tl.constexpr = dim // 2
    head = first + tl.arange(0, together)[:, None]
    col = tl.arange(0, half)[None, :]
    source = qkv + token * (heads + 2 * kv_heads) * dim + head * dim + col
    low = tl.load(source)
    high = tl.load(source + half)
    position = tl.load(positions + token)
    if first < heads + kv_heads:
        weight = q_norm if first < heads else k_norm
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
        factor = (1.0 / tl.sqrt(squares / dim + eps))[:, None]
        a = ((wide_low * factor).to(low.dtype) * tl.load(weight + col)).to(tl.float32)
        b = ((wide_high * factor).to(low.dtype) * tl.load(weight + half + col)).to(tl.float32)
        c = tl.load(cos + position * half + col)
        s = tl.load(sin + position * half + col)
        low = (a * c - b * s).to(low.dtype)
        high = (b * c + a * s).to(low.dtype)
    if first < heads:
        target = queries + token * heads * dim + head * dim + col
        tl.store(target, low)
        tl.store(target + half, high)
    else:
        owner = tl.load(owners + token)
        page = tl.load(page_ids + tl.load(page_indptr + owner) + position // page_size).to(tl.int64)
        row = page * page_stride + (position % page_size) * row_stride
        if first < heads + kv_heads:
            target = keys + row + (head - heads) * dim + col
        else:
            target = values + row + (head - heads - kv_heads) * dim + col
        tl.store(target, low)
        tl.store(target + half, high)


def store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    owners: torch.Tensor,
    page_ids: torch.Tensor,
    page_indptr: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """Store K and V and return queries [tokens, heads, dim]; keys and values are [page, row, head, dim] views."""
    _, page_size, kv_heads, dim = keys.shape
    queries = qkv.new_empty(qkv.shape[0], heads, dim)
    together = next(n for n in (8, 4, 2, 1) if heads % n == 0 and kv_heads % n == 0)
    _store[(qkv.shape[0], (heads + 2 * kv_heads) // together)](
        qkv, *norms, *tables, positions, owners, page_ids, page_indptr, queries, keys, values, eps,
        keys.stride(0), keys.stride(1), heads, kv_heads, dim, page_size, together, num_warps=4 if together >= 4 else 1,
    )  # fmt: skip
    return queries
