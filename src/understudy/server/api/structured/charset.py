"""Sets of characters, and the alphabet from which texts are written."""

from __future__ import annotations

import string
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PREFERRED = string.ascii_lowercase + string.digits + string.ascii_uppercase + " -_.:/@" + string.punctuation
_OTHERS = "é日😀\n\t"
_LAST = 0x10FFFF


def is_word(character: str) -> bool:
    r"""Whether `\w` matches the character."""
    return character.isalnum() or character == "_"


CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "WORD": is_word,
    "SPACE": str.isspace,
    "NOT_DIGIT": lambda character: not character.isdecimal(),
    "NOT_WORD": lambda character: not is_word(character),
    "NOT_SPACE": lambda character: not character.isspace(),
}


class CharSet:
    """Characters given by ranges of code points and by categories, or all others if `negated`."""

    def __init__(
        self,
        ranges: Iterable[tuple[int, int]] = (),
        categories: Iterable[str] = (),
        *,
        negated: bool = False,
        fold: bool = False,
    ) -> None:
        self.ranges = tuple(ranges)
        self.categories = tuple(categories)
        self.negated = negated
        self.fold = fold
        """Ignore case."""

    def key(self) -> tuple[object, ...]:
        """Return a value that is equal for equal sets."""
        return (self.ranges, self.categories, self.negated, self.fold)

    def __contains__(self, character: str) -> bool:
        forms = {character, character.lower(), character.upper()} if self.fold else (character,)
        return any(len(form) == 1 and self._holds(form) for form in forms) != self.negated

    def _holds(self, character: str) -> bool:
        code = ord(character)
        return any(low <= code <= high for low, high in self.ranges) or any(
            CATEGORIES[name](character) for name in self.categories
        )


class Alphabet:
    """Characters that texts are written with, the preferred first; a subset of them is a mask of bits."""

    def __init__(self) -> None:
        self._codes: dict[int, None] = dict.fromkeys(map(ord, _PREFERRED + _OTHERS))

    def add(self, chars: CharSet) -> None:
        """Add the ends of the set's ranges and their neighbours, so that every set has a member."""
        for low, high in chars.ranges:
            for code in (low, high, low - 1, high + 1):
                if 0 <= code <= _LAST and not 0xD800 <= code <= 0xDFFF:  # no half of a surrogate pair
                    self._codes[code] = None

    @cached_property
    def letters(self) -> str:
        """All characters; call it after the last `add`."""
        return "".join(map(chr, self._codes))

    def mask(self, chars: CharSet) -> int:
        """Return the bits of the letters that are in the set."""
        return sum(1 << place for place, letter in enumerate(self.letters) if letter in chars)
