"""Forms of answers: a choice, a regular expression, a JSON schema, a grammar or structural tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.structured.formed import MAX_CHARACTERS, Formed, FormError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FORMED = 1 << 22
"""Characters of all formed answers to one request together: they are made when the request arrives."""
_COSTLY_STEPS = 2048
_TOKEN_CHARACTERS = 256
"""A token has fewer characters."""


def characters_for(tokens: int) -> int:
    """Return more characters than an answer of so many tokens can have, or MAX_CHARACTERS."""
    return min((tokens + 2) * _TOKEN_CHARACTERS, MAX_CHARACTERS)


class Form:
    """Make answers of one form. FormError says why the library refuses the form."""

    def __init__(self, structure: dict[str, Any]) -> None:
        ((kind, value),) = structure.items()
        self._costly: Formed | None = None
        self._make: Callable[[int, int], Formed]
        if kind == "choice":
            self._make = _read_choices(value)
        elif kind == "object":
            self._make = lambda _key, _most: Formed('{"answer": "yes"}')
        else:
            from understudy.structured.chooser import Chooser  # loads the library

            self._make = Chooser(kind, value).choose

    def answer(self, key: int, most: int = MAX_CHARACTERS) -> Formed:
        """Return an answer of at most `most` characters; equal keys give equal answers."""
        known = self._costly
        if known is not None and (known.has_ended or len(known.text) >= most):
            return Formed(known.text[:most], len(known.text) <= most and known.has_ended)
        formed = self._make(key, most)
        if formed.steps > _COSTLY_STEPS:  # the other answers to the request repeat it
            self._costly = formed
        return formed


def _read_choices(choices: Any) -> Callable[[int, int], Formed]:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise FormError("structured_outputs.choice must be a list of strings, with at least one.")
    return lambda key, _most: Formed(choices[key % len(choices)])
