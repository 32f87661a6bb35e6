"""A matrix times one row: what a decode step of a single request does, and all it waits for is the matrix.

The norm before it costs nothing here. Its scale is one number for the whole row, so the product is taken of the row
without it, the squares are summed on the way, and the result is divided at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _matvec(  # type: ignore[no-untyped-def]
    x, residual, norm, weight, out, total, outs, eps, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    adds: tl.constexpr, normed: tl.constexpr, gates: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = (row < outs)[:, None]
    col = tl.arange(0, block)
    product = tl.zeros([rows, block], tl.float32)
    other = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    source = weight + row.to(tl.int64)[:, None] * width
    below = source
    if gates:
        below += outs.to(tl.int64) * width
    # Start loading the matrix before the row is loaded.
    first = inside & (col < width)[None, :]
    matrix = tl.load(source + col[None, :], mask=first, other=0.0)
    if gates:
        second = tl.load(below + col[None, :], mask=first, other=0.0)
    for at in tl.static_range(0, width, block):
        within = at + col < width
        if at > 0:
            both = inside & within[None, :]
            matrix = tl.load(source + (at + col)[None, :], mask=both, other=0.0)
            if gates:
                second = tl.load(below + (at + col)[None, :], mask=both, other=0.0)
        value = tl.load(x + at + col, mask=within, other=0.0)
        if adds:
            more = tl.load(residual + at + col, mask=within, other=0.0)
            value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
            if tl.program_id(0) == 0:
                tl.store(total + at + col, value, mask=within)
        part = value.to(tl.float32)
        if normed:
            squares += part * part
            part *= tl.load(norm + at + col, mask=within, other=0.0).to(tl.float32)
        product += matrix.to(tl.float32) * part[None, :]
        if gates:
            other += second.to(tl.float32) * part[None, :]
    result = tl.sum(product, axis=1)
    factor = 1.0
    if normed:
        factor = 1.0 / tl.sqrt(tl.sum(squares) / width + eps)
        result *= factor
    kind: tl.constexpr = out.dtype.element_ty
    answer = result.to(kind)
    if gates:
        gate = answer.to(tl.float32)
        answer = (gate / (1.0 + tl.exp(-gate))).to(kind) * (tl.sum(other, axis=1) * factor).to(kind)
    tl.store(out + row, answer, mask=row < outs)


def shape_of(outs: int, width: int, gates: bool) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and warps, tuned on an H200 with the shapes of Qwen3-4B."""
    if gates:
        return 1, 2048, 2
    if outs > 65536:
        return 2, 2048, 2
    if width > 4096:
        return 2, 1024, 4
    return (2, 512, 1) if outs > 4096 else (1, 1024, 8)


def matvec(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [1, in] by the transpose of `weight` [out, in]."""
    return _launch(x, None, None, weight, 0.0, gates=False)[0]


def normed_matvec(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    gates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply the norm of `x + residual` (without `x`: of `residual`) by `weight`; return it and the sum.

    With `gates`, SiLU of the first half of the result times the second.
    """
    if x is None:
        return _launch(residual, None, norm, weight, eps, gates=gates)[0], residual
    return _launch(x, residual, norm, weight, eps, gates=gates)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    gates: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, width = weight.shape[0] // (2 if gates else 1), weight.shape[1]
    out = x.new_empty(1, outs)
    total = x if residual is None else x.new_empty(x.shape)
    rows, block, warps = shape_of(outs, width, gates)
    block = min(block, triton.next_power_of_2(width))
    _matvec[(triton.cdiv(outs, rows),)](
        x, x if residual is None else residual, x if norm is None else norm, weight, out, total, outs, eps, width,
        rows, block, residual is not None, norm is not None, gates, num_warps=warps,
    )  # fmt: skip
    return out, total
