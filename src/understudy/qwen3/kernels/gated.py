"""The first matrix of the MLP times a few rows, with its gate: a batch of decodes waits for the matrix alone.

A program has some rows of both halves, so that the gate is applied before anything is written. The other matrices of a
layer are too small to gain by it, and more rows leave cuBLAS nothing to wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

MOST_ROWS = 64
"""Maximum rows; for more, cuBLAS is faster (measured on an H200)."""


@triton.jit(do_not_specialize=["count"])
def _gated(  # type: ignore[no-untyped-def]
    x, weight, out, count, outs, width: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, rows)
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    there = (row < count)[:, None]
    inside = (place < outs)[:, None]
    upper = weight + place.to(tl.int64)[:, None] * width
    lower = upper + outs.to(tl.int64) * width
    gate = tl.zeros([rows, tile], tl.float32)
    up = tl.zeros([rows, tile], tl.float32)
    for at in range(0, width, block):
        col = (at + tl.arange(0, block))[None, :]
        within = col < width
        value = tl.load(x + row[:, None] * width + col, mask=there & within, other=0.0)
        first = tl.load(upper + col, mask=inside & within, other=0.0)
        second = tl.load(lower + col, mask=inside & within, other=0.0)
        gate = tl.dot(value, tl.trans(first), gate, input_precision="ieee")
        up = tl.dot(value, tl.trans(second), up, input_precision="ieee")
    kind: tl.constexpr = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    answer = (gate / (1.0 + tl.exp(-gate))).to(kind) * up.to(kind)
    tl.store(out + row[:, None] * outs + place[None, :], answer, mask=there & (place < outs)[None, :])


def shape_of(rows: int) -> tuple[int, int, int, int, int]:
    """Return rows of `x`, rows of a half, columns of a tile, warps and stages, tuned for Qwen3-4B's shapes."""
    if rows <= 16:
        return 16, 32, 128, 4, 3
    return (32, 16, 64, 2, 4) if rows <= 32 else (64, 32, 64, 4, 4)


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [rows, in] by the transpose of `gate_up` [2 * out, in]; return SiLU of the first half × second."""
    outs, width = gate_up.shape[0] // 2, gate_up.shape[1]
    out = x.new_empty(x.shape[0], outs)
    rows, tile, block, warps, stages = shape_of(x.shape[0])
    block = min(block, max(16, triton.next_power_of_2(width)))
    _gated[(triton.cdiv(outs, tile),)](
        x, gate_up, out, x.shape[0], outs, width, rows, tile, block, num_warps=warps, num_stages=stages
    )
    return out
