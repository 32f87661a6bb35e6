"""Paged causal attention of prompt chunks; the pages contain the cached prefix and the chunk itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    query, keys, values, pages, top, total, mixed, start, end, last, limit, kv_head, scale, page_stride, row_stride,
    dim: tl.constexpr, page_size: tl.constexpr, block: tl.constexpr, masked: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, dim)
    for at in range(start, end, block):
        position = at + tl.arange(0, block)
        if masked:
            inside = position < last
            page = tl.load(pages + position // page_size, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages + position // page_size).to(tl.int64)
        row = page * page_stride + (position % page_size) * row_stride + kv_head * dim
        if masked:
            key = tl.load(keys + row[:, None] + col[None, :], mask=inside[:, None], other=0.0)
            value = tl.load(values + row[:, None] + col[None, :], mask=inside[:, None], other=0.0)
        else:
            key = tl.load(keys + row[:, None] + col[None, :])
            value = tl.load(values + row[:, None] + col[None, :])
        if exact:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(key)) * scale
        if masked:
            score = tl.where(position[None, :] <= limit[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        if exact:
            mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        else:
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    return top, total, mixed


# Slices of one array have any alignment: compile one kernel for all.
@triton.jit(
    do_not_specialize_on_alignment=[
        *("page_ids", "page_indptr", "seq_lens", "chunk_indptr", "tile_owners", "tile_starts"),
    ]
)
def _prefill(  # type: ignore[no-untyped-def]
    queries, keys, values, page_ids, page_indptr, seq_lens, chunk_indptr, tile_owners, tile_starts, out, scale,
    page_stride, row_stride, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    request = tl.load(tile_owners + tl.program_id(0))
    if request < 0:
        return
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    first = tl.load(chunk_indptr + request)
    chunk = tl.load(chunk_indptr + request + 1) - first
    start = tl.load(tile_starts + tl.program_id(0)) + tl.program_id(2) * rows
    if start >= chunk:
        return
    length = tl.load(seq_lens + request)
    history = length - chunk
    pages = page_ids + tl.load(page_indptr + request)
    member = start + tl.arange(0, rows)
    col = tl.arange(0, dim)
    mine = (member < chunk)[:, None]
    place = ((first + member).to(tl.int64) * heads + head)[:, None] * dim + col[None, :]
    query = tl.load(queries + place, mask=mine, other=0.0)
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, dim], tl.float32)
    limit = history + member
    whole = (history + start + 1) // block * block  # keys that every row of the tile sees
    last = tl.minimum(length, history + start + rows)
    top, total, mixed = _tile(
        query, keys, values, pages, top, total, mixed, 0, whole, last, limit, kv_head, scale, page_stride, row_stride,
        dim, page_size, block, False, exact,
    )  # fmt: skip
    top, total, mixed = _tile(
        query, keys, values, pages, top, total, mixed, whole, last, last, limit, kv_head, scale, page_stride,
        row_stride, dim, page_size, block, True, exact,
    )  # fmt: skip
    tl.store(out + place, (mixed / total[:, None]).to(query.dtype), mask=mine)


def prefill_attention(
    queries: torch.Tensor,
    page_ids: torch.Tensor,
    page_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    chunk_indptr: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor, int],
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention of queries [tokens, heads, dim], chunk after chunk, into `out` of equal shape.

    `tiles` are the pieces of chunks that programs compute: owners (-1: none), starts, and the rows of each.
    """
    heads, dim = queries.shape[1:]
    _, page_size, kv_heads, _ = keys.shape
    tile_owners, tile_starts, tile_rows = tiles
    exact = queries.dtype == torch.float32
    rows = min(tile_rows, 32) if exact else tile_rows
    block, warps, stages = launch_of(rows)
    _prefill[(tile_owners.shape[0], heads, tile_rows // rows)](
        queries, keys, values, page_ids, page_indptr, seq_lens, chunk_indptr, tile_owners, tile_starts, out,
        dim**-0.5 * 1.4426950408889634, keys.stride(0), keys.stride(1), heads, kv_heads, dim, page_size, rows, block,
        exact, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def launch_of(rows: int) -> tuple[int, int, int]:
    """Return keys per tile, warps and stages, tuned on an H200."""
    return {128: (128, 8, 3), 64: (128, 4, 3)}.get(rows, (64, 4, 3))
