"""`KvLayout`: the memory layout of KV pages, and the number of blocks that fit into a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from understudy.errors import ConfigError
from understudy.kv.counts import count


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of one rank's KV buffer, outermost first: page, layer, K or V, row, head, dim.

    A page is contiguous, so one transfer copies it. Lengths and strides count elements.
    """

    page_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        for field in ("page_size", "num_layers", "kv_heads", "head_dim", "dtype_bytes"):
            object.__setattr__(self, field, count(field, getattr(self, field), 1, ConfigError))

    @property
    def kv_block_len(self) -> int:
        """Elements of K (or V) of one layer in one page."""
        return self.page_size * self.kv_heads * self.head_dim

    @property
    def layer_stride(self) -> int:
        """Elements from one layer to the next inside a page."""
        return 2 * self.kv_block_len

    @property
    def page_stride(self) -> int:
        """Elements of one page."""
        return self.num_layers * self.layer_stride

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return self.page_stride * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token on this rank."""
        return self.page_bytes // self.page_size

    def shard(self, tensor_parallel: int) -> KvLayout:
        """Return the layout of one of `tensor_parallel` ranks, each with an equal share of the heads."""
        if self.kv_heads % count("tensor_parallel", tensor_parallel, 1, ConfigError):
            raise ConfigError(f"tensor_parallel={tensor_parallel} does not divide kv_heads={self.kv_heads}")
        return KvLayout(
            self.page_size, self.num_layers, self.kv_heads // tensor_parallel, self.head_dim, self.dtype_bytes
        )

    def block_budget(self, free_bytes: int | Sequence[int], utilization: float = 0.85) -> int:
        """Return the blocks that fit into `utilization` of the free bytes of the rank with the least.

        ConfigError if fewer than two fit: one block is padding, so no request could run.
        """
        if not 0 < utilization <= 1:
            raise ConfigError(f"utilization must be in (0, 1], got {utilization}")
        given = list(free_bytes) if isinstance(free_bytes, Sequence) else [free_bytes]
        ranks = [count("free_bytes", value, 0, ConfigError) for value in given]
        if not ranks:
            raise ConfigError(f"free_bytes must be one or more non-negative ints, got {free_bytes!r}")
        blocks = int(min(ranks) * utilization) // self.page_bytes
        if blocks < 2:
            raise ConfigError(
                f"free_bytes={min(ranks)} at utilization={utilization} fits {blocks} blocks of {self.page_bytes} "
                "bytes; at least 2 are needed (one is padding)"
            )
        return blocks
