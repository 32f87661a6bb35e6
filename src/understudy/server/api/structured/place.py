"""Where in an answer a value is."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Position of a value, and what leads to it."""

    key: int
    """Selects among equally good values."""
    depth: int = 0
    references: frozenset[str] = frozenset()
    """`$ref`s on the way from the root."""
