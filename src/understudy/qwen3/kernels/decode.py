"""Paged attention of one query per request, split along the context so that small batches also fill the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from understudy.timing.recorded.shapes import Parts

BLOCK = 64
"""Tokens that a program reads per iteration."""


@triton.jit
def _share(length, splits: tl.constexpr, block: tl.constexpr, least: tl.constexpr):  # type: ignore[no-untyped-def]
    # Tokens of a context that one program reads; a short one leaves programs idle.
    return tl.maximum(tl.cdiv(tl.cdiv(length, splits), block) * block, least)


# Slices of one array have any alignment: compile one kernel for all.
@triton.jit(do_not_specialize_on_alignment=["page_ids", "page_indptr", "seq_lens"])
def _decode(  # type: ignore[no-untyped-def]
    queries, keys, values, page_ids, page_indptr, seq_lens, out, partial, stats, scale, page_stride, row_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, splits: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, least: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = heads // kv_heads
    length = tl.load(seq_lens + request)
    share = _share(length, splits, block, least)
    start = split * share
    if start >= length:
        return
    end = tl.minimum(start + share, length)
    pages = page_ids + tl.load(page_indptr + request)

    member = tl.arange(0, rows)
    col = tl.arange(0, dim)
    head = kv_head * group + member
    mine = (member < group)[:, None]
    query = tl.load(
        queries + request * heads * dim + head[:, None] * dim + col[None, :], mask=mine, other=0.0
    )
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, dim], tl.float32)
    for at in range(start, end, block):
        position = at + tl.arange(0, block)
        inside = position < end
        page = tl.load(pages + position // page_size, mask=inside, other=0).to(tl.int64)
        row = page * page_stride + (position % page_size) * row_stride + kv_head * dim
        key = tl.load(keys + row[:, None] + col[None, :], mask=inside[:, None], other=0.0)
        value = tl.load(values + row[:, None] + col[None, :], mask=inside[:, None], other=0.0)
        if exact:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        if exact:
            mixed = mixed * shrink[:, None] + tl.dot(weight, value, input_precision="ieee")
        else:
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = higher
    if splits == 1:
        target = out + request * heads * dim + head[:, None] * dim + col[None, :]
        tl.store(target, (mixed / total[:, None]).to(query.dtype), mask=mine)
    else:
        place = (request * heads + head) * splits + split
        tl.store(partial + place[:, None] * dim + col[None, :], mixed, mask=mine)
        tl.store(stats + place * 2, top, mask=member < group)
        tl.store(stats + place * 2 + 1, total, mask=member < group)


@triton.jit(do_not_specialize_on_alignment=["seq_lens"])
def _merge(  # type: ignore[no-untyped-def]
    partial, stats, seq_lens, out, heads: tl.constexpr, splits: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
    least: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + head // heads)
    split = tl.arange(0, splits)
    col = tl.arange(0, dim)
    here = split * _share(length, splits, block, least) < length
    top = tl.load(stats + (head * splits + split) * 2, mask=here, other=float("-inf"))
    total = tl.load(stats + (head * splits + split) * 2 + 1, mask=here, other=0.0)
    weight = tl.exp2(top - tl.max(top))
    mixed = tl.load(
        partial + (head * splits + split)[:, None] * dim + col[None, :], mask=here[:, None], other=0.0
    )
    value = tl.sum(mixed * weight[:, None], axis=0) / tl.sum(total * weight)
    tl.store(out + head * dim + col, value.to(out.dtype.element_ty))


def decode_attention(
    queries: torch.Tensor,
    page_ids: torch.Tensor,
    page_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    parts: Parts,
) -> None:
    """Compute attention of queries [batch, heads, dim] over their requests' pages into `out` of equal shape."""
    splits, least = parts
    batch, heads, dim = queries.shape
    _, page_size, kv_heads, _ = keys.shape
    partial, stats = out, out
    if splits > 1:
        partial = torch.empty(batch * heads * splits, dim, dtype=torch.float32, device=queries.device)
        stats = torch.empty(batch * heads * splits * 2, dtype=torch.float32, device=queries.device)
    rows = max(16, triton.next_power_of_2(heads // kv_heads))
    _decode[(batch, kv_heads, splits)](
        queries, keys, values, page_ids, page_indptr, seq_lens, out, partial, stats, dim**-0.5 * 1.4426950408889634,
        keys.stride(0), keys.stride(1), heads, kv_heads, dim, page_size, splits, rows, BLOCK, least,
        queries.dtype == torch.float32, num_warps=2, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _merge[(batch * heads,)](partial, stats, seq_lens, out, heads, splits, dim, BLOCK, least, num_warps=4)
