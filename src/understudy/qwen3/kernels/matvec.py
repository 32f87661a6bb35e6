"""A matrix times one row: what a decode step of a single request does, and all it waits for is the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _matvec(x, weight, out, outs, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = (row < outs)[:, None]
    col = tl.arange(0, block)
    total = tl.zeros([rows, block], tl.float32)
    for at in range(0, width, block):
        within = at + col < width
        part = tl.load(x + at + col, mask=within, other=0.0).to(tl.float32)
        source = weight + row.to(tl.int64)[:, None] * width + (at + col)[None, :]
        total += tl.load(source, mask=inside & within[None, :], other=0.0).to(tl.float32) * part[None, :]
    tl.store(out + row, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=row < outs)


@triton.jit
def _matvec_gate(x, weight, out, outs, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = (row < outs)[:, None]
    col = tl.arange(0, block)
    gate = tl.zeros([rows, block], tl.float32)
    up = tl.zeros([rows, block], tl.float32)
    for at in range(0, width, block):
        within = at + col < width
        both = inside & within[None, :]
        part = tl.load(x + at + col, mask=within, other=0.0).to(tl.float32)
        source = weight + row.to(tl.int64)[:, None] * width + (at + col)[None, :]
        gate += tl.load(source, mask=both, other=0.0).to(tl.float32) * part[None, :]
        up += tl.load(source + outs.to(tl.int64) * width, mask=both, other=0.0).to(tl.float32) * part[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    g = tl.sum(gate, axis=1).to(kind).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(kind)
    tl.store(out + row, silu * tl.sum(up, axis=1).to(kind), mask=row < outs)


def matvec(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [1, in] times the transpose of `weight` [out, in]."""
    outs, width = weight.shape
    out = x.new_empty(1, outs)
    rows = 4 if outs <= 8192 else 8
    _matvec[(triton.cdiv(outs, rows),)](x, weight, out, outs, width, rows, 512, num_warps=4)
    return out


def matvec_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of `x` times `weight`, times the second half."""
    outs, width = weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(1, outs)
    _matvec_gate[(triton.cdiv(outs, 4),)](x, weight, out, outs, width, 4, 512, num_warps=4)
    return out
