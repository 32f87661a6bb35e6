"""Shapes of captured CUDA graphs of the real engine, and the shape that a step is padded to."""

from __future__ import annotations

from typing import NamedTuple

DECODE_ROWS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 257, 16))
"""Decode rows of graphs without prompts."""
CHUNK_ROWS: tuple[int, ...] = (64, *range(128, 2049, 128))
"""Prompt rows of graphs; in a larger step the kernels run longer than the host needs to launch them."""
MIXED_DECODE_ROWS = (0, 16, 64, 128, 256)
"""Decode rows of graphs with prompts."""
MAX_CHUNKS = 32
"""Most prompts in one captured step."""
SHORT_CHUNK_TOKENS = 32
"""Up to so many prompt tokens are computed as decodes of the same pages, which split a long context."""
UNEVEN_ROWS = 32
"""Number of decodes that fill the device with one program per context and head; a long context then delays the step."""
PARTS_COST_TOKENS = 6
"""Cost of reading contexts in parts, per decode, in context tokens of equal time."""


class Shape(NamedTuple):
    """Rows of a captured step: prompt rows, then decode rows, whose contexts may be `uneven`."""

    chunk_rows: int
    decode_rows: int
    uneven: bool = False

    @property
    def tokens(self) -> int:
        """Number of rows."""
        return self.chunk_rows + self.decode_rows

    @property
    def in_parts(self) -> bool:
        """Whether it reads contexts in parts; with prompts always from 32 decodes on, because prompts dominate."""
        return self.uneven or (self.chunk_rows > 0 and self.decode_rows >= UNEVEN_ROWS)

    @property
    def slots(self) -> int:
        """Number of prompts that fit."""
        return MAX_CHUNKS if self.chunk_rows else 0

    @property
    def tile_rows(self) -> int:
        """Prompt rows per attention program."""
        return 64 if self.chunk_rows <= 512 else 128

    @property
    def tiles(self) -> int:
        """Most attention programs that the prompts need."""
        return self.chunk_rows // self.tile_rows + self.slots


class Parts(NamedTuple):
    """Split of contexts: at most `most` parts, each of at least `tokens` tokens except the last."""

    most: int
    tokens: int = 64


def is_uneven(decodes: int, context_tokens: int, longest: int) -> bool:
    """Whether waiting for the longest context costs more than reading in parts (measured on an H200)."""
    if decodes <= _largest_below(UNEVEN_ROWS):
        return False
    return longest - context_tokens / decodes > PARTS_COST_TOKENS * decodes


def parts_of(rows: int, kv_heads: int = 8, multiprocessors: int = 132, *, uneven: bool = False) -> Parts:
    """Return the split of contexts for a number of decode rows; one graph then serves all context lengths.

    Small batches get more parts than fill the device, so that the longest context does not delay the step. A large
    batch fills the device by itself and pays for each part, so it is split only if it is uneven.
    """
    if uneven:
        return Parts(16, 512 if rows < 128 else 1024)
    wanted = multiprocessors * (8 if rows < UNEVEN_ROWS else 2) // (rows * kv_heads)
    return Parts(min(32 if rows == 1 else 16, 1 << max(0, wanted.bit_length() - 1)))


def shape_of(chunk_tokens: int, chunks: int, decodes: int, *, uneven: bool = False) -> Shape | None:
    """Return the smallest shape that fits a step; None without one. With prompts, `uneven` makes no difference."""
    if chunks == 0:
        return None if decodes == 0 else _check_shape(Shape(0, _pad(DECODE_ROWS, decodes), uneven))
    if chunks > MAX_CHUNKS:
        return None
    return _check_shape(Shape(_pad(CHUNK_ROWS, chunk_tokens), _pad(MIXED_DECODE_ROWS, decodes)))


def shapes_up_to(max_tokens: int, max_decodes: int) -> list[Shape]:
    """Return all shapes that steps within these limits are padded to, the largest first."""
    decodes = _up_to(DECODE_ROWS, min(max_decodes + SHORT_CHUNK_TOKENS, max_tokens))
    mixed = _up_to(MIXED_DECODE_ROWS, max_decodes)
    shapes = [Shape(0, rows) for rows in decodes]
    shapes += [Shape(0, rows, uneven=True) for rows in decodes if rows >= UNEVEN_ROWS]
    shapes += [Shape(rows, others) for rows in _up_to(CHUNK_ROWS, max_tokens) for others in mixed]
    return sorted(shapes, key=lambda shape: shape.tokens, reverse=True)


def is_short(chunk_tokens: int, decodes: int) -> bool:
    """Whether a step with prompts is computed as decodes only."""
    return chunk_tokens <= SHORT_CHUNK_TOKENS and chunk_tokens + decodes <= DECODE_ROWS[-1]


def _largest_below(rows: int) -> int:
    """Return the largest number of decodes that is padded to fewer rows."""
    return max(size for size in DECODE_ROWS if size < rows)


def _pad(sizes: tuple[int, ...], wanted: int) -> int:
    return next((size for size in sizes if size >= wanted), -1)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    last = _pad(sizes, most)
    return sizes if last < 0 else tuple(size for size in sizes if size <= last)


def _check_shape(shape: Shape) -> Shape | None:
    return None if -1 in shape[:2] else shape
