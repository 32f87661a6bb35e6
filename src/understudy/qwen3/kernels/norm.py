"""RMS norm with an optional residual added first, and the gate of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(x, residual, weight, out, total, eps, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * width
    cols = tl.arange(0, block)
    inside = cols < width
    scale = tl.load(weight + cols, mask=inside, other=0.0)
    value = tl.load(x + row + cols, mask=inside, other=0.0)
    if adds:
        value = (
            value.to(tl.float32) + tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(total + row + cols, value, mask=inside)
    wide = value.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out + row + cols, (wide * factor).to(value.dtype) * scale, mask=inside)


@triton.jit
def _gate(gate_up, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * block + tl.arange(0, block)
    inside = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=inside, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * width + cols, silu * up, mask=inside)


def add_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of every row of `x + residual` (without `x`: of `residual`), and that sum."""
    out = torch.empty_like(residual)
    total = residual if x is None else torch.empty_like(residual)
    width = residual.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(residual.shape[0],)](
        residual if x is None else x, residual, weight, out, total, eps, width, block, x is not None,
        num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    return out, total


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU of the first half of every row times the second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = 1024
    _gate[(triton.cdiv(width, block), rows)](gate_up, out, width, block)
    return out
