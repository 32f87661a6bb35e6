"""Argmax of every row: parts of a row in parallel, then the best of them; the first of equal maxima."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits per program."""


@triton.jit
def _best(logits, values, places, width, parts, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * block + tl.arange(0, block)
    value = tl.load(logits + row * width + at, mask=at < width, other=float("-inf")).to(tl.float32)
    most, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(values + row * parts + part, most)
    tl.store(places + row * parts + part, part * block + place)


@triton.jit
def _pick(values, places, out, parts, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    _, part = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(places + row * parts + part).to(tl.int64))


def argmax(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Write the index of the maximum of every row of `logits` [rows, vocabulary] to `out` [rows] of int64."""
    rows, width = logits.shape
    parts = triton.cdiv(width, BLOCK)
    values = torch.empty(rows * parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    _best[(rows, parts)](logits, values, places, width, parts, BLOCK, num_warps=8)
    _pick[(rows,)](values, places, out, parts, triton.next_power_of_2(parts), num_warps=1)
