"""Which steps are captured: every shape that a CUDA graph is made for, and the one that a step is padded to."""

from __future__ import annotations

from typing import NamedTuple

DECODE_ROWS = (1, 2, 4, 8, *range(16, 257, 16))
"""Decodes of a step without prompts."""
CHUNK_ROWS = (64, *range(128, 2049, 128))
"""Tokens of prompts in a step; a larger one keeps the device busy for longer than it takes to launch its kernels."""
BESIDE_ROWS = (0, 16, 64, 128, 256)
"""Decodes beside prompts."""
MOST_CHUNKS = 32
"""Prompts in one step."""
SHORT_CHUNK_TOKENS = 32
"""Up to so many tokens of prompts are computed as so many decodes of the same pages, which split a long context."""


class Shape(NamedTuple):
    """Rows that a captured step has: of prompts, then of decodes."""

    chunk_rows: int
    decode_rows: int

    @property
    def tokens(self) -> int:
        """All rows."""
        return self.chunk_rows + self.decode_rows

    @property
    def slots(self) -> int:
        """Prompts that it has room for."""
        return MOST_CHUNKS if self.chunk_rows else 0

    @property
    def tile_rows(self) -> int:
        """Rows of a prompt that one program attends for."""
        return 64 if self.chunk_rows <= 512 else 128

    @property
    def tiles(self) -> int:
        """Programs that its prompts need at most."""
        return self.chunk_rows // self.tile_rows + self.slots


def shape_of(chunk_tokens: int, chunks: int, decodes: int) -> Shape | None:
    """The smallest that holds such a step, or None when none does."""
    if chunks == 0:
        return None if decodes == 0 else _found(Shape(0, _least(DECODE_ROWS, decodes)))
    if chunks > MOST_CHUNKS:
        return None
    return _found(Shape(_least(CHUNK_ROWS, chunk_tokens), _least(BESIDE_ROWS, decodes)))


def shapes_up_to(max_tokens: int, max_decodes: int) -> list[Shape]:
    """All that steps of such limits are padded to, the largest first."""
    decodes = _up_to(DECODE_ROWS, min(max_decodes + SHORT_CHUNK_TOKENS, max_tokens))
    beside = _up_to(BESIDE_ROWS, max_decodes)
    shapes = [Shape(0, rows) for rows in decodes]
    shapes += [Shape(rows, others) for rows in _up_to(CHUNK_ROWS, max_tokens) for others in beside]
    return sorted(shapes, key=lambda shape: shape.tokens, reverse=True)


def is_short(chunk_tokens: int, decodes: int) -> bool:
    """Whether a step with prompts is computed as decodes alone."""
    return chunk_tokens <= SHORT_CHUNK_TOKENS and chunk_tokens + decodes <= DECODE_ROWS[-1]


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    return next((size for size in sizes if size >= wanted), -1)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    last = _least(sizes, most)
    return sizes if last < 0 else tuple(size for size in sizes if size <= last)


def _found(shape: Shape) -> Shape | None:
    return None if -1 in shape else shape
