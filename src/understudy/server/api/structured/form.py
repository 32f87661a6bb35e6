"""Forms of answers: a choice, a regular expression, a JSON schema or any JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.server.api.errors import ApiError
from understudy.server.api.structured.document import Document
from understudy.server.api.structured.errors import FormError, OutOfSteps, Steps
from understudy.server.api.structured.pattern import PatternReader
from understudy.server.api.structured.place import Place
from understudy.server.api.structured.regex import Expressions
from understudy.server.api.structured.solver import Solver
from understudy.server.api.structured.texts import MAX_CHARACTERS, spell, texts_of
from understudy.server.api.structured.values import TooLong, json_of

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FORMED = 1 << 22
"""Characters of all formed answers to one request together: they are made when the request arrives."""
_COSTLY_STEPS = 2048
_TOKEN_CHARACTERS = 256
"""A token has fewer characters."""


class Formed(NamedTuple):
    """An answer of a form."""

    text: str
    too_long: str = ""
    """Only the beginning was made: the keyword that asks for more than MAX_CHARACTERS characters."""
    steps: int = 0
    """Steps that it took to make, of about 10 microseconds."""


def characters_for(tokens: int) -> int:
    """Return more characters than an answer of so many tokens can have."""
    return (tokens + 2) * _TOKEN_CHARACTERS


class Form:
    """Make answers of one form. ApiError names the part of the form that is not supported or cannot be met."""

    def __init__(self, structure: dict[str, Any]) -> None:
        ((kind, value),) = structure.items()
        makers: dict[str, Callable[[Any], Callable[[int], Formed]]] = {
            "choice": _choice,
            "regex": _regex,
            "json": _json,
            "object": lambda _: lambda _: Formed('{"answer": "yes"}'),
        }
        if kind not in makers:
            raise ApiError(f"structured_outputs: {kind} is not supported; give json, choice or regex.")
        self._make = makers[kind](value)

    def answer(self, key: int) -> Formed:
        """Return an answer; equal keys give equal answers."""
        return self._make(key)


def _choice(choices: Any) -> Callable[[int], Formed]:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ApiError("structured_outputs.choice must be a list of strings, with at least one.")
    return lambda key: Formed(choices[key % len(choices)])


def _regex(pattern: Any) -> Callable[[int], Formed]:
    if not isinstance(pattern, str):
        raise ApiError("structured_outputs.regex must be a string.")
    on, steps = Expressions(), Steps()
    try:
        node = PatternReader(on).read(pattern, whole=True, steps=steps).node
        begun = spell(on, node, 0) if node.least > MAX_CHARACTERS else None
        if begun is not None:
            made = Formed(begun[:MAX_CHARACTERS], "regex")
        else:
            made = Formed(next(texts_of(on, node, 0, MAX_CHARACTERS, steps)))
    except ValueError as error:
        raise ApiError(f"structured_outputs.regex: {error}") from None
    except StopIteration:
        raise ApiError("structured_outputs.regex: no text matches the pattern") from None
    except (OutOfSteps, RecursionError):
        raise ApiError("structured_outputs.regex: the pattern is too complex; simplify it") from None
    return lambda _: made


def _json(schema: Any) -> Callable[[int], Formed]:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise ApiError(f"structured_outputs.json is no JSON: {error}") from None
    solver = Solver(Document(schema))

    costly: list[Formed] = []

    def make(key: int) -> Formed:
        if costly:
            return costly[0]._replace(steps=0)
        value = instance(solver, key)
        steps = solver.steps.used
        # A text that looks like a special token would be dropped from the answer: escape its first character.
        text = json_of(value).replace("<", "\\u003c")
        is_long = isinstance(value, TooLong) or len(text) > MAX_CHARACTERS
        formed = Formed(text[:MAX_CHARACTERS], _named(solver, *_LENGTHENING) if is_long else "", steps)
        if steps > _COSTLY_STEPS:  # the other answers to the request repeat it
            costly.append(formed)
        return formed

    return make


_LENGTHENING = ("minItems", "minLength", "minProperties", "pattern", "required", "const", "enum", "$ref")


def instance(solver: Solver, key: int) -> Any:
    """Return a value that the schema admits, or the beginning of one that is too long.

    FormError names a keyword that cannot be satisfied.
    """
    root = solver.document.root
    solver.restart()
    too_complex = False
    try:
        for value in solver.values([root], Place(key)):
            if isinstance(value, TooLong):
                return value
            broken = solver.validator.broken(value, root)
            if not broken:
                return value
            solver.rule_out(broken)
    except (OutOfSteps, RecursionError):
        too_complex = True
    keyword = _named(solver, solver.conflict, "oneOf", "anyOf", "$ref")
    if too_complex:
        raise FormError(keyword, "no value was found in time; simplify the schema")
    raise FormError(keyword, "no value satisfies it together with the rest of the schema; relax it")


def _named(solver: Solver, *candidates: str) -> str:
    """Return the first candidate that the schema uses."""
    used = solver.document.keywords
    return next((name for name in candidates if name in used), min(used, default="schema"))
