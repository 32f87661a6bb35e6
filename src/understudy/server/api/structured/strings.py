"""Strings of a length, patterns and formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.server.api.structured.formats import FORMATS
from understudy.server.api.structured.texts import MAX_CHARACTERS, spell, texts_of
from understudy.server.api.structured.values import LongText

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.server.api.structured.constraints import Constraints
    from understudy.server.api.structured.document import Document
    from understudy.server.api.structured.errors import Steps

_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")


def strings_of(wanted: Constraints, document: Document, key: int, steps: Steps) -> Iterator[str]:
    """Yield strings that meet all that is asked of strings, each once."""
    on = document.expressions
    low, high = wanted.lengths.low, wanted.lengths.high
    is_free = not (wanted.patterns or wanted.other_patterns or wanted.formats)
    plain: list[str] = []
    if is_free and low <= MAX_CHARACTERS:
        words = (_WORDS[(key + place) % len(_WORDS)] for place in range(len(_WORDS)))
        plain = list(dict.fromkeys(word.ljust(low, "x")[: int(min(high, MAX_CHARACTERS))] for word in words))
        yield from plain
    parts = [document.pattern(text).node for text in wanted.patterns]
    parts += [document.format(name).node for name in wanted.formats]
    parts += [on.other(document.pattern(text).outer) for text in wanted.other_patterns]
    node = on.both(parts)
    if max(low, node.least) > MAX_CHARACTERS and node is not on.none:
        positive = [document.pattern(text).node for text in wanted.patterns]
        begun = spell(on, positive[0], low) if positive else "x" * MAX_CHARACTERS
        if begun:
            yield LongText(begun[:MAX_CHARACTERS])
        return
    for name in wanted.formats:
        text = FORMATS[name].example
        if low <= len(text) <= high and on.matches(node, text, steps):
            plain.append(text)
            yield text
    for text in texts_of(on, node, low, high, steps):
        if text not in plain and all(FORMATS[name].check(text) for name in wanted.formats):
            yield text
