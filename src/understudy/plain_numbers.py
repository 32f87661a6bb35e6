"""Parse numbers on command lines, which Python reads too leniently. Imports nothing, so that the parser starts fast."""

from __future__ import annotations


def parse_whole_number(text: str) -> int:
    """Parse a whole number in ASCII digits. ValueError for other digits, underscores and other text."""
    return int(_plain(text))


def parse_number(text: str) -> float:
    """Parse a number in ASCII digits. ValueError for other digits, underscores and other text."""
    return float(_plain(text))


def _plain(text: str) -> str:
    if "_" in text or not text.isascii():  # Python's int() takes 1_0 and full-width digits
        raise ValueError(text)
    return text
