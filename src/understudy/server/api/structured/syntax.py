"""Parse Python's regular expressions into lists of items, after `re.compile` has found them valid."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

Item = tuple[str, Any]
"""A kind and its value:

`chars`: (ranges, categories, negated); `any`: None; `branch`: lists of items; `at`: a place;
`group`: (number or None, added flags, removed flags, items); `repeat`: (least, most, items); `reference`: a number.
"""
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|N\{([^}]+)\}|(0[0-7]{0,2}|[0-7]{3})|([1-9]\d?)|(.))",
    re.S,
)
_ESCAPE_IN_SET = re.compile(_ESCAPE.pattern.replace("0[0-7]{0,2}|[0-7]{3}", "[0-7]{1,3}"), re.S)
_REPEAT = re.compile(r"(?:([*+?])|\{(?!\})(\d*)(?:(,)(\d*))?\})([?+]?)")
_GROUP = re.compile(
    r"\((?:\?(?:(:)|P<(\w+)>|P=(\w+)\)|(#[^)]*\))|([aimsuxL]*)(?:-([imsx]+))?([:)])|(.)))?", re.S
)
_LETTERS = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_CATEGORIES = {"d": "DIGIT", "s": "SPACE", "w": "WORD", "D": "NOT_DIGIT", "S": "NOT_SPACE", "W": "NOT_WORD"}
_PLACES = {"A": "start", "Z": "end", "b": "boundary", "B": "inside"}
_LIMITS = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}


class Syntax:
    """Parses one pattern. ValueError says which part is not supported."""

    def __init__(self, text: str) -> None:
        compiled = re.compile(text)
        self.flags = compiled.flags
        if self.flags & (re.M | re.X):
            raise ValueError("the flags m and x are not supported; leave them out")
        self._names = compiled.groupindex
        self._text = text
        self._at = self._groups = 0
        self.items = self._alternatives()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _alternatives(self) -> list[Item]:
        branches: list[list[Item]] = [[]]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                branches.append([])
                continue
            repeat = self._match(_REPEAT)
            if repeat is not None:
                branches[-1][-1] = self._repeated(branches[-1][-1], repeat)
            elif (item := self._item()) is not None:
                branches[-1].append(item)
        return branches[0] if len(branches) == 1 else [("branch", branches)]

    def _repeated(self, item: Item, repeat: re.Match[str]) -> Item:
        sign, low, comma, high, kind = repeat.groups()
        if kind == "+":
            raise ValueError("possessive repeat is not supported; leave it out")
        least, most = _LIMITS[sign] if sign else (int(low or 0), int(high) if high else math.inf)
        if not sign and not comma:
            most = least
        return "repeat", (least, most, [item])

    def _item(self) -> Item | None:
        letter = self._text[self._at]
        if letter == "\\":
            kind, value = self._escape(_ESCAPE)
            if kind == "category":
                return "chars", ([], [value], False)
            return (kind, value) if kind != "code" else _one(value)
        if letter == "(":
            return self._group()
        self._at += 1
        if letter == "[":
            return self._set()
        if letter == ".":
            return "any", None
        if letter in "^$":
            return "at", "start" if letter == "^" else "end"
        return _one(ord(letter))

    def _escape(self, pattern: re.Pattern[str]) -> Item:
        found = self._match(pattern)
        assert found is not None
        *codes, name, octal, group, letter = found.groups()
        code = next((digits for digits in codes if digits), None)
        if code or octal:
            return "code", int(code, 16) if code else int(octal, 8)
        if name:
            return "code", ord(unicodedata.lookup(name))
        if group:
            return "reference", int(group)
        if letter in _CATEGORIES:
            return "category", _CATEGORIES[letter]
        if letter in _PLACES and pattern is _ESCAPE:
            return "at", _PLACES[letter]
        return "code", _LETTERS.get(letter, ord(letter))

    def _set(self) -> Item:
        negated = self._text[self._at] == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        categories: list[str] = []
        first = self._at
        while self._text[self._at] != "]" or self._at == first:
            kind, low = self._member()
            if kind == "category":
                categories.append(low)
                continue
            high = low
            if self._text[self._at] == "-" and self._text[self._at + 1] != "]":
                self._at += 1
                _, high = self._member()
            ranges.append((low, high))
        self._at += 1
        return "chars", (ranges, categories, negated)

    def _member(self) -> Item:
        letter = self._text[self._at]
        if letter == "\\":
            return self._escape(_ESCAPE_IN_SET)
        self._at += 1
        return "code", ord(letter)

    def _group(self) -> Item | None:
        found = self._match(_GROUP)
        assert found is not None
        plain, _, reference, comment, added, removed, end, other = found.groups()
        if other:
            kind = "lookaround" if other in "=!<" else "this kind of group"
            raise ValueError(f"{kind} is not supported; leave it out")
        if reference:
            return "reference", self._names[reference]
        if comment or end == ")":  # flags of the whole pattern
            return None
        number = None
        if not plain and end is None:
            self._groups += 1
            number = self._groups
        if any(flag in "mxL" for flag in (added or "") + (removed or "")):
            raise ValueError("flags other than i and s are not supported; leave them out")
        items = self._alternatives()
        self._at += 1
        return "group", (number, added or "", removed or "", items)


def _one(code: int) -> Item:
    return "chars", ([(code, code)], [], False)
