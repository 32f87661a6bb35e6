"""Which steps are captured: every shape that a CUDA graph is made for, and the one that a step is padded to."""

from __future__ import annotations

from typing import NamedTuple

DECODE_ROWS: tuple[int, ...] = (1, 2, 4, 8, *range(16, 257, 16))
"""Decodes of a step without prompts."""
CHUNK_ROWS: tuple[int, ...] = (64, *range(128, 2049, 128))
"""Tokens of prompts in a step; a larger one keeps the device busy for longer than it takes to launch its kernels."""
BESIDE_ROWS = (0, 16, 64, 128, 256)
"""Decodes beside prompts."""
MOST_CHUNKS = 32
"""Prompts in one step."""
SHORT_CHUNK_TOKENS = 32
"""Up to so many tokens of prompts are computed as so many decodes of the same pages, which split a long context."""
UNEVEN_ROWS = 32
"""So many decodes fill the device, one program for each context and head. Then a long one among them is waited for."""
PARTS_COST_TOKENS = 6
"""What it costs to read all of them in parts, for each: so many more tokens of one context would take as long."""


class Shape(NamedTuple):
    """Rows that a captured step has: of prompts, then of decodes, whose contexts may be `uneven`."""

    chunk_rows: int
    decode_rows: int
    uneven: bool = False

    @property
    def tokens(self) -> int:
        """All rows."""
        return self.chunk_rows + self.decode_rows

    @property
    def in_parts(self) -> bool:
        """Whether it reads contexts in parts however many they are: beside prompts always, which take far longer."""
        return self.uneven or (self.chunk_rows > 0 and self.decode_rows >= UNEVEN_ROWS)

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


class Parts(NamedTuple):
    """Contexts are read in up to so many parts at a time, none of fewer tokens but the last of a context."""

    most: int
    tokens: int = 64


def is_uneven(decodes: int, context_tokens: int, longest: int) -> bool:
    """Whether a step of decodes would wait longer for its longest context than parts cost (measured on an H200)."""
    if decodes <= _below(UNEVEN_ROWS):
        return False
    return longest - context_tokens / decodes > PARTS_COST_TOKENS * decodes


def parts_of(rows: int, kv_heads: int = 8, multiprocessors: int = 132, *, uneven: bool = False) -> Parts:
    """How contexts of so many decodes are read: known from a shape alone, so that its graph serves every length.

    More parts than would fill the device, so that nobody waits for the longest context; a large batch fills it by
    itself and would pay for each, so that it gets them only if it is uneven.
    """
    if uneven:
        return Parts(16, 512 if rows < 128 else 1024)
    wanted = multiprocessors * (8 if rows < UNEVEN_ROWS else 2) // (rows * kv_heads)
    return Parts(min(32 if rows == 1 else 16, 1 << max(0, wanted.bit_length() - 1)))


def shape_of(chunk_tokens: int, chunks: int, decodes: int, *, uneven: bool = False) -> Shape | None:
    """The smallest that holds such a step, or None when none does. Beside prompts one is for `uneven` contexts too."""
    if chunks == 0:
        return None if decodes == 0 else _found(Shape(0, _least(DECODE_ROWS, decodes), uneven))
    if chunks > MOST_CHUNKS:
        return None
    return _found(Shape(_least(CHUNK_ROWS, chunk_tokens), _least(BESIDE_ROWS, decodes)))


def shapes_up_to(max_tokens: int, max_decodes: int) -> list[Shape]:
    """All that steps of such limits are padded to, the largest first."""
    decodes = _up_to(DECODE_ROWS, min(max_decodes + SHORT_CHUNK_TOKENS, max_tokens))
    beside = _up_to(BESIDE_ROWS, max_decodes)
    shapes = [Shape(0, rows) for rows in decodes]
    shapes += [Shape(0, rows, uneven=True) for rows in decodes if rows >= UNEVEN_ROWS]
    shapes += [Shape(rows, others) for rows in _up_to(CHUNK_ROWS, max_tokens) for others in beside]
    return sorted(shapes, key=lambda shape: shape.tokens, reverse=True)


def is_short(chunk_tokens: int, decodes: int) -> bool:
    """Whether a step with prompts is computed as decodes alone."""
    return chunk_tokens <= SHORT_CHUNK_TOKENS and chunk_tokens + decodes <= DECODE_ROWS[-1]


def _below(rows: int) -> int:
    """The most decodes that are padded to fewer rows."""
    return max(size for size in DECODE_ROWS if size < rows)


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    return next((size for size in sizes if size >= wanted), -1)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    last = _least(sizes, most)
    return sizes if last < 0 else tuple(size for size in sizes if size <= last)


def _found(shape: Shape) -> Shape | None:
    return None if -1 in shape[:2] else shape
