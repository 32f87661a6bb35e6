"""The memory behind the pages of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.kv import KvLayout


class KvBuffer:
    """One allocation for all pages: `pages[page, layer, K or V, row, head, dim]`. Its address never changes."""

    def __init__(self, num_blocks: int, layout: KvLayout, dtype: torch.dtype, device: torch.device) -> None:
        if dtype.itemsize != layout.dtype_bytes:
            raise ConfigError(f"dtype {dtype} has {dtype.itemsize} bytes, the layout {layout.dtype_bytes}")
        self.layout = layout
        shape = (num_blocks, layout.num_layers, 2, layout.page_size, layout.kv_heads, layout.head_dim)
        self.pages = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        """Pages, padding included."""
        return int(self.pages.shape[0])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, `[page, row, head, dim]` each, without a copy."""
        return self.pages[:, index, 0], self.pages[:, index, 1]
