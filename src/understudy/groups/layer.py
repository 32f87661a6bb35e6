"""`Layer`: what one layer keeps in the KV cache, and the bytes of its page."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count

Kind = Literal[
    "full", "mla", "sliding_window", "sliding_window_mla", "chunked_local", "mamba", "rswa", "circular"
]
DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1, "fp8": 1}

_FULL = ("full", "mla", "rswa")
_LATENT = ("mla", "sliding_window_mla", "circular")
_NEEDED = {
    "sliding_window": "window",
    "sliding_window_mla": "window",
    "rswa": "window",
    "chunked_local": "chunk",
}


class Layer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cache of one layer on one GPU. Equal layers can share a group."""

    kind: Kind
    block_size: int | None = None
    """Tokens per block; the plan sets it for states."""
    kv_heads: int = 0
    head_size: int = 0
    dtype: str = "bf16"
    window: int | None = None
    chunk: int | None = None
    """Tokens per chunk of local attention."""
    tokens_per_state: int = 1
    """Tokens that share one stored entry (compressed MLA)."""
    state_bytes: int | None = None
    """Bytes per entry, if not KV heads × head size × bytes per element."""
    alignment: int | None = None
    """Round the page of an MLA layer up to a multiple of this, in bytes."""
    version: str | None = None
    role: str | None = None
    bounded_replay: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of a state's tensors, with `dtypes` in the same order."""
    dtypes: tuple[str, ...] = ()
    checkpoint_blocks: int = 0
    checkpoint_alignment: int | Literal["grid"] | None = None
    """Tokens between possible checkpoints of a state; grid: `prefix_match_unit`, or the block."""
    padded_page: int | None = None
    """Page bytes after padding; the plan sets it."""

    def __post_init__(self) -> None:
        if self.kind == "mamba":
            self._check_state()
            return
        for name in ("block_size", "kv_heads", "head_size", "tokens_per_state"):
            count(f"layers: {name} of {self.kind}", getattr(self, name), 1, ConfigError)
        for name in ("window", "chunk", "state_bytes", "alignment"):
            if getattr(self, name) is not None:
                count(f"layers: {name} of {self.kind}", getattr(self, name), 1, ConfigError)
        _bytes_of(self.dtype)
        needed = _NEEDED.get(self.kind)
        if needed is not None and getattr(self, needed) is None:
            raise ConfigError(f"layers: {self.kind} has no {needed}; give its tokens")
        if self.bounded_replay and self.kind != "sliding_window_mla":
            raise ConfigError(
                f"layers: bounded_replay of {self.kind}: only sliding_window_mla has it; leave it out"
            )

    def _check_state(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(
                f"layers: mamba has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give one dtype per shape"
            )
        for shape in self.shapes:
            for size in shape:
                count("layers: shapes of mamba", size, 1, ConfigError)
        for dtype in self.dtypes:
            _bytes_of(dtype)
        count("layers: checkpoint_blocks of mamba", self.checkpoint_blocks, 0, ConfigError)

    @property
    def tokens(self) -> int:
        """Tokens per block. ConfigError for a state that has no block yet."""
        if self.block_size is None:
            raise ConfigError(
                "layers: block_size of mamba: no attention layer sets it; give block_size, or turn prefix caching off"
            )
        return self.block_size

    @property
    def is_full(self) -> bool:
        """Whether the layer keeps every token: full attention, MLA or reference windows."""
        return self.kind in _FULL

    @property
    def is_cacheable(self) -> bool:
        """Whether prefix caching finds blocks of the layer."""
        return self.kind != "circular" and not self.bounded_replay

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer, with padding."""
        return self.own_page_bytes if self.padded_page is None else self.padded_page

    @property
    def own_page_bytes(self) -> int:
        """Bytes of one block of this layer, without the plan's padding."""
        if self.kind == "mamba":
            sizes = zip(self.shapes, self.dtypes, strict=True)
            return sum(math.prod(shape) * _bytes_of(dtype) for shape, dtype in sizes)
        entry = self.kv_heads * self.head_size * _bytes_of(self.dtype)
        if self.kind not in _LATENT:
            return 2 * self.tokens * entry
        page = -(-self.tokens // self.tokens_per_state) * (self.state_bytes or entry)
        return page if self.alignment is None else -(-page // self.alignment) * self.alignment

    @property
    def spec(self) -> Layer:
        """The layer without the window of full attention or MLA, which its cache does not depend on."""
        return msgspec.structs.replace(self, window=None) if self.kind in ("full", "mla") else self

    @property
    def uniform_type(self) -> tuple[object, ...]:
        """Key of the layers that need equal numbers of blocks, and so can share a group of mixed pages."""
        if self.is_full:
            return ("full", self.block_size)
        if self.kind == "mamba":
            return ("mamba", self.block_size, self.page_bytes, self.checkpoint_blocks)
        return (self.kind, self.block_size, self.window, self.chunk, self.bounded_replay)

    def with_block(self, block_size: int) -> Layer:
        """Return the layer with another block size."""
        return msgspec.structs.replace(self, block_size=block_size)

    def padded_to(self, page_bytes: int | None) -> Layer:
        """Return the layer with its page padded to `page_bytes`."""
        return msgspec.structs.replace(self, padded_page=page_bytes)

    def as_full(self, block_size: int | None = None) -> Layer:
        """Return the layer as one that keeps every token, if it has a window or chunks."""
        if self.kind not in ("sliding_window", "sliding_window_mla", "chunked_local"):
            return self
        kind: Kind = "mla" if self.kind == "sliding_window_mla" else "full"
        return msgspec.structs.replace(
            self, kind=kind, block_size=block_size or self.block_size, chunk=None, bounded_replay=False
        )


def _bytes_of(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"layers: dtype {dtype!r} is not known; give one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
