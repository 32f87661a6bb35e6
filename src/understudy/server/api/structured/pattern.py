"""Patterns: parsed after ECMAScript's spellings are translated into Python's."""

from __future__ import annotations

import math
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.structured.charset import CharSet
from understudy.server.api.structured.syntax import Syntax
from understudy.server.api.structured.texts import texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from understudy.server.api.structured.errors import Steps
    from understudy.server.api.structured.regex import Expressions, Node
    from understudy.server.api.structured.syntax import Item

MAX_PATTERN = 1 << 14
"""Characters of one pattern: Python's parser takes seconds for a longer one."""
_ECMA = re.compile(r"\\c([A-Za-z])|\\k<(\w+)>|\\u\{([0-9A-Fa-f]{1,6})\}|(\\[pP]\{)|\\.|(\(\?<)(?![=!])", re.S)


class Pattern(NamedTuple):
    """A pattern as an expression for the whole text."""

    node: Node
    outer: Node
    """Matches at least what the pattern matches: `node` gives a group that is referred to one fixed text."""


class PatternReader:
    """Read patterns into expressions over one alphabet. ValueError says what a pattern has that cannot be read."""

    def __init__(self, expressions: Expressions) -> None:
        self._on = expressions
        self._fixed: dict[int, Node] = {}
        """Groups that are referred to, with the one text that each is given."""
        self._free: dict[int, Sequence[Item]] = {}
        """Groups whose references may match all that the group matches."""
        self._needed: set[int] = set()
        self._dot_all = self._fold = False

    def read(self, text: str, *, whole: bool, steps: Steps) -> Pattern:
        """Read a pattern that matches somewhere in a text, or all of it if `whole`."""
        if len(text) > MAX_PATTERN:
            raise ValueError(f"a pattern has at most {MAX_PATTERN} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                syntax = Syntax(_in_python(text))
            items = syntax.items
            self._free = {}
            self._fixed, self._needed = {}, {value for kind, value in _walk(items) if kind == "reference"}
            self._dot_all, self._fold = bool(syntax.flags & re.S), bool(syntax.flags & re.I)
            self._fix_groups(items, steps)
            read = self._sequence if whole else self._search
            node = outer = read(items)
            if self._needed:
                self._needed, self._fixed, self._free = set(), {}, _groups(items)
                outer = read(items)
        except (re.error, OverflowError, KeyError) as error:
            raise ValueError(f"the pattern cannot be read: {error}") from None
        except RecursionError:
            raise ValueError("the pattern is nested too deeply; simplify it") from None
        return Pattern(node, outer)

    # ── Anchors ──

    def _search(self, items: list[Item]) -> Node:
        """Match the items anywhere; an anchor at either side leaves nothing to match beyond it."""
        on = self._on
        if len(items) == 1:
            kind, value = items[0]
            if kind == "branch":
                return on.alt(self._search(branch) for branch in value)
            if kind == "group" and value[0] not in self._needed and not value[1] and not value[2]:
                return self._search(value[3])
        starts = bool(items) and items[0] == ("at", "start")
        items = items[1:] if starts else items
        ends = bool(items) and items[-1] == ("at", "end")
        items = items[:-1] if ends else items
        before, after = (on.empty if starts else on.anything), (on.empty if ends else on.anything)
        return on.cat(before, on.cat(self._sequence(items), after))

    # ── Parts ──

    def _sequence(self, items: Sequence[Item]) -> Node:
        node = self._on.empty
        for item in reversed(items):
            node = self._on.cat(self._part(*item), node)
        return node

    def _part(self, kind: str, value: Any) -> Node:
        on = self._on
        match kind:
            case "chars":
                return self._set(*value)
            case "any":
                return (
                    on.any if self._dot_all else self._set([(10, 10), (13, 13), (0x2028, 0x2029)], (), True)
                )
            case "branch":
                branches = [branch for branch in value if self._defined(branch)] or value
                return on.alt(self._sequence(branch) for branch in branches)
            case "group":
                return self._group(*value)
            case "repeat":
                low, high, items = value
                if low == 0 and self._defined(items):
                    low = 1
                return on.repeat(self._sequence(items), low, high)
            case "at":
                return on.at(value)
        return self._fixed[value] if value in self._fixed else self._any_of(value)

    def _set(self, ranges: list[tuple[int, int]], categories: Sequence[str], negated: bool) -> Node:
        return self._on.chars(CharSet(ranges, categories, negated=negated, fold=self._fold))

    def _group(self, group: int | None, added: str, removed: str, items: Sequence[Item]) -> Node:
        if group in self._fixed:
            return self._fixed[group]
        kept = self._dot_all, self._fold
        self._dot_all = (self._dot_all or "s" in added) and "s" not in removed
        self._fold = (self._fold or "i" in added) and "i" not in removed
        node = self._sequence(items)
        self._dot_all, self._fold = kept
        return node

    # ── Back-references ──

    def _fix_groups(self, parsed: Sequence[Item], steps: Steps) -> None:
        """Give each group that is referred to its shortest text: what matches then matches the pattern, too."""
        items = _groups(parsed)
        pending = sorted(self._needed, reverse=True)  # inner groups first
        while pending:
            for group in pending:
                try:
                    node = self._sequence(items[group])
                except KeyError:  # it refers to another one
                    continue
                text = next(texts_of(self._on, node, 0, math.inf, steps), None)
                if text is None or node.anchored:
                    raise ValueError("a back-reference to this group is not supported; repeat the group")
                self._fixed[group] = self._literal(text)
                pending.remove(group)
                break
            else:
                raise ValueError("a group refers to itself")

    def _literal(self, text: str) -> Node:
        codes = map(ord, text)
        return self._sequence([("chars", ([(code, code)], (), False)) for code in codes])

    def _any_of(self, group: int) -> Node:
        return self._on.alt((self._on.empty, self._sequence(self._free[group])))

    def _defined(self, items: Sequence[Item]) -> bool:
        """Whether the items define a group that is referred to, and may so not be left out."""
        return bool(self._needed) and any(
            kind == "group" and value[0] in self._needed for kind, value in _walk(items)
        )


def _groups(items: Sequence[Item]) -> dict[int, Sequence[Item]]:
    return {value[0]: value[3] for kind, value in _walk(items) if kind == "group" and value[0]}


def _walk(items: Sequence[Item]) -> Iterator[Item]:
    for kind, value in items:
        yield kind, value
        if kind == "branch":
            for branch in value:
                yield from _walk(branch)
        elif kind == "group":
            yield from _walk(value[3])
        elif kind == "repeat":
            yield from _walk(value[2])


def _in_python(text: str) -> str:
    """Translate what ECMAScript spells differently: named groups, control letters and long code points."""

    def translated(found: re.Match[str]) -> str:
        control, name, code, category, group = found.groups()
        if category:
            raise ValueError("Unicode properties are not supported; name the characters")
        if control:
            return re.escape(chr(ord(control) % 32))
        if name:
            return f"(?P={name})"
        if code:
            return re.escape(chr(int(code, 16)))
        return "(?P<" if group else found[0]

    return _ECMA.sub(translated, text)
