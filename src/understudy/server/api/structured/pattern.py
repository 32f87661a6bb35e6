"""Patterns: read with Python's parser after ECMAScript's spellings are translated into Python's."""

from __future__ import annotations

import math
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.structured.charset import CharSet
from understudy.server.api.structured.texts import texts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from understudy.server.api.structured.errors import Steps
    from understudy.server.api.structured.regex import Expressions, Node

MAX_PATTERN = 1 << 14
"""Characters of one pattern: Python's parser takes seconds for a longer one."""
_PLACES = {
    "AT_BEGINNING": "start",
    "AT_BEGINNING_STRING": "start",
    "AT_END": "end",
    "AT_END_STRING": "end",
    "AT_BOUNDARY": "boundary",
    "AT_NON_BOUNDARY": "inside",
}
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
        self._free: dict[int, Sequence[Any]] = {}
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
                parsed: Any = re._parser.parse(_in_python(text))  # type: ignore[attr-defined]
            flags = parsed.state.flags
            self._free = {}
            self._fixed, self._needed = {}, {value for name, value in _walk(parsed) if name == "GROUPREF"}
            self._dot_all, self._fold = bool(flags & re.S), bool(flags & re.I)
            if flags & re.M:
                raise ValueError("the flag m is not supported; leave it out")
            self._fix_groups(parsed, steps)
            read = self._sequence if whole else self._search
            node = outer = read(list(parsed))
            if self._needed:
                self._needed, self._fixed, self._free = set(), {}, _groups(parsed)
                outer = read(list(parsed))
        except (re.error, OverflowError, KeyError) as error:
            raise ValueError(f"the pattern cannot be read: {error}") from None
        except RecursionError:
            raise ValueError("the pattern is nested too deeply; simplify it") from None
        return Pattern(node, outer)

    # ── Anchors ──

    def _search(self, items: list[Any]) -> Node:
        """Match the items anywhere; an anchor at either side leaves nothing to match beyond it."""
        on = self._on
        if len(items) == 1:
            (name, value) = str(items[0][0]), items[0][1]
            if name == "BRANCH":
                return on.alt(self._search(list(branch)) for branch in value[1])
            if name == "SUBPATTERN" and value[0] not in self._needed and not value[1] and not value[2]:
                return self._search(list(value[3]))
        starts = bool(items) and _place(items[0]) == "start"
        items = items[1:] if starts else items
        ends = bool(items) and _place(items[-1]) == "end"
        items = items[:-1] if ends else items
        before, after = (on.empty if starts else on.anything), (on.empty if ends else on.anything)
        return on.cat(before, on.cat(self._sequence(items), after))

    # ── Parts ──

    def _sequence(self, items: Sequence[Any]) -> Node:
        node = self._on.empty
        for item in reversed(items):
            node = self._on.cat(self._part(str(item[0]), item[1]), node)
        return node

    def _part(self, name: str, value: Any) -> Node:
        on = self._on
        match name:
            case "LITERAL":
                return self._set([(value, value)])
            case "NOT_LITERAL":
                return self._set([(value, value)], negated=True)
            case "ANY":
                return (
                    on.any
                    if self._dot_all
                    else self._set([(10, 10), (13, 13), (0x2028, 0x2029)], negated=True)
                )
            case "IN":
                return self._members(value)
            case "BRANCH":
                branches = [branch for branch in value[1] if self._defined(branch)] or value[1]
                return on.alt(self._sequence(branch) for branch in branches)
            case "SUBPATTERN":
                return self._group(*value)
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high = int(value[0]), math.inf if value[1] == re._parser.MAXREPEAT else int(value[1])  # type: ignore[attr-defined]
                if low == 0 and self._defined(value[2]):
                    low = 1
                return on.repeat(self._sequence(value[2]), low, high)
            case "AT":
                return on.at(_PLACES[str(value)])
            case "GROUPREF":
                return self._fixed[value] if value in self._fixed else self._any_of(value)
            case "ASSERT" | "ASSERT_NOT":
                raise ValueError("lookaround is not supported; leave it out")
        raise ValueError(f"{name.lower().replace('_', ' ')} is not supported; leave it out")

    def _set(
        self, ranges: list[tuple[int, int]], categories: Sequence[str] = (), *, negated: bool = False
    ) -> Node:
        return self._on.chars(CharSet(ranges, categories, negated=negated, fold=self._fold))

    def _members(self, members: Sequence[Any]) -> Node:
        ranges: list[tuple[int, int]] = []
        categories: list[str] = []
        negated = False
        for kind, value in members:
            match str(kind):
                case "NEGATE":
                    negated = True
                case "LITERAL":
                    ranges.append((value, value))
                case "RANGE":
                    ranges.append(tuple(value))
                case _:
                    categories.append(str(value).removeprefix("CATEGORY_"))
        return self._set(ranges, categories, negated=negated)

    def _group(self, group: int | None, added: int, dropped: int, items: Sequence[Any]) -> Node:
        if (added | dropped) & ~(re.I | re.S | re.U | re.A):
            raise ValueError("flags other than i and s are not supported; leave them out")
        if group in self._fixed:
            return self._fixed[group]
        kept = self._dot_all, self._fold
        self._dot_all = (self._dot_all or bool(added & re.S)) and not dropped & re.S
        self._fold = (self._fold or bool(added & re.I)) and not dropped & re.I
        node = self._sequence(items)
        self._dot_all, self._fold = kept
        return node

    # ── Back-references ──

    def _fix_groups(self, parsed: Any, steps: Steps) -> None:
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
                self._fixed[group] = self._sequence([("LITERAL", ord(letter)) for letter in text])
                pending.remove(group)
                break
            else:
                raise ValueError("a group refers to itself")

    def _any_of(self, group: int) -> Node:
        return self._on.alt((self._on.empty, self._sequence(self._free[group])))

    def _defined(self, items: Sequence[Any]) -> bool:
        """Whether the items define a group that is referred to, and may so not be left out."""
        return bool(self._needed) and any(
            name == "SUBPATTERN" and value[0] in self._needed for name, value in _walk(items)
        )


def _groups(parsed: Any) -> dict[int, Sequence[Any]]:
    return {value[0]: value[3] for name, value in _walk(parsed) if name == "SUBPATTERN"}


def _place(item: Any) -> str:
    return _PLACES.get(str(item[1]), "") if str(item[0]) == "AT" else ""


def _walk(items: Any) -> Iterator[tuple[str, Any]]:
    for operation, value in items:
        name = str(operation)
        yield name, value
        if name == "BRANCH":
            for branch in value[1]:
                yield from _walk(branch)
        elif name == "SUBPATTERN":
            yield from _walk(value[3])
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
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
