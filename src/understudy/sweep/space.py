"""The space of a sweep: the values of every varied flag, and their combinations."""

from __future__ import annotations

import math
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Value = int | float | str | bool | None
"""Value of a varied flag as it is shown; None leaves the flag out."""

Point = tuple[int, ...]
"""One combination: for every dimension, the index of its value."""

SPLIT = "split"
"""Dimension of `--splits`: `2+4` are 2 prefill and 4 decode workers, `6` are 6 workers without roles."""

MAX_VALUES = 100_000

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:([*+])(\d+))?")


class Dimension(msgspec.Struct, frozen=True):
    """A varied flag, without dashes, and its values as texts; an empty text leaves the flag out."""

    flag: str
    texts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Dimension:
        """Parse `FLAG=VALUES`: a list, `a..b`, `a..b*2` (doubling) or `a..b+4` (in steps). ConfigError if invalid."""
        name, equals, listed = text.partition("=")
        name = name.removeprefix("--")
        if not equals or not name:
            raise ConfigError(f"--vary {text}: no values; write it as FLAG=VALUES, such as workers=1..8")
        texts: list[str] = []
        for part in _split(listed):
            texts += _expand(name, part)
        if repeated := next((one for place, one in enumerate(texts) if one in texts[:place]), None):
            raise ConfigError(f"--vary {name}: {repeated} is given twice; give it once")
        return cls(name, tuple(texts))

    @property
    def values(self) -> tuple[Value, ...]:
        """Values as numbers where they are numbers."""
        return tuple(map(_read_value, self.texts))


class Space(msgspec.Struct, frozen=True):
    """All combinations of the values of its dimensions, the last dimension varying fastest."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Space:
        """Parse the values of `--vary`. ConfigError names a flag that is given twice."""
        dimensions = tuple(map(Dimension.parse, texts))
        names = [each.flag for each in dimensions]
        if repeated := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ConfigError(f"--vary {repeated}: given twice; join the values with commas")
        return cls(dimensions)

    @property
    def size(self) -> int:
        """Number of combinations."""
        return math.prod(len(each.texts) for each in self.dimensions)

    def points(self) -> Iterator[Point]:
        """Yield all combinations in grid order."""
        return product(*(range(len(each.texts)) for each in self.dimensions))

    def texts(self, point: Point) -> dict[str, str]:
        """Return the values of a combination as texts, by flag."""
        return {each.flag: each.texts[at] for each, at in zip(self.dimensions, point, strict=True)}

    def values(self, point: Point) -> dict[str, Value]:
        """Return the values of a combination, by flag."""
        return {each.flag: each.values[at] for each, at in zip(self.dimensions, point, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Return the values of every flag."""
        return {each.flag: list(each.values) for each in self.dimensions}


def _split(listed: str) -> list[str]:
    """Split at commas outside of brackets, so that a value may be JSON."""
    parts, depth = [""], 0
    for letter in listed:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expand(flag: str, part: str) -> list[str]:
    found = _RANGE.fullmatch(part)
    if found is None:
        if ".." in part and part.replace(".", "").isdecimal():
            raise ConfigError(
                f"--vary {flag}: {part} is no range of whole numbers; list the values with commas"
            )
        return [part]
    first, last, operator, factor = int(found[1]), int(found[2]), found[3], int(found[4] or 1)
    if last < first or (operator == "*" and (factor < 2 or first < 1)) or (operator == "+" and factor < 1):
        raise ConfigError(f"--vary {flag}: {part} is empty or endless; write it as 1..8, 1..8*2 or 1..8+2")
    if operator == "*":
        values = []
        while first <= last:
            values.append(first)
            first *= factor
    else:
        values = list(range(first, min(last, first + MAX_VALUES * factor) + 1, factor))
    if len(values) > MAX_VALUES:
        raise ConfigError(f"--vary {flag}: {part} has more than {MAX_VALUES:,} values; use a larger step")
    return list(map(str, values))


def _read_value(text: str) -> Value:
    if not text:
        return None
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text
