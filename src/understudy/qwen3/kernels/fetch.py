"""Transfer between pinned host memory and the device by a kernel, because a copy would queue behind pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit(do_not_specialize=["count"])
def _fetch(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def fetch(source: torch.Tensor, target: torch.Tensor, count: int) -> None:
    """Copy the first `count` ints of `source` to `target`; the device must be able to access both."""
    _fetch[(triton.cdiv(count, 1024),)](source, target, count, 1024)
