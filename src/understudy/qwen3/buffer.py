"""Memory of one rank's pages."""

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
        """Number of pages, including padding."""
        return int(self.pages.shape[0])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's keys and values, each `[page, row, head, dim]`."""
        return self.pages[:, index, 0], self.pages[:, index, 1]
