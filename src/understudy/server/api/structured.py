"""Answers that have a given form: made from the form alone, the same every time."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import xxh3_64
from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_DEPTH = 16
_MAX_ITEMS = 16
_MAX_PARTS = 10_000
"""Of a value, however often a schema refers to itself; what follows is null."""
MAX_CHARACTERS = 1 << 17
"""Of a whole answer, whatever its form asks for; none is as long."""
MAX_PATTERN = 1 << 14
"""Characters of a pattern: reading a long one takes seconds."""
MAX_PATTERNS = 1 << 16
"""Of all that one answer goes by."""
_MOST = 1e300
"""A number that a schema asks for."""
MAX_FORMED = 1 << 22
"""Characters of all answers to one request together: they are made when it comes, while everybody waits."""
_TOKEN_CHARACTERS = 256
"""A token stands for fewer."""


def characters_for(tokens: int) -> int:
    """As much of a text as an answer of so many tokens can tell, and somewhat more: its end need not be made."""
    return min((tokens + 2) * _TOKEN_CHARACTERS, MAX_CHARACTERS)


def structured_text(structure: dict[str, Any], key: int, most: int = MAX_CHARACTERS) -> str:
    """A text of the form, its first `most` characters or so. ApiError names a form that cannot be made."""
    if "choice" in structure:
        choices = structure["choice"]
        if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
            raise ApiError("structured_outputs.choice must be a list of strings, with at least one.")
        return str(choices[key % len(choices)])
    if "regex" in structure:
        return _matching(structure["regex"], most)
    if "json" in structure:
        schema = structure["json"]
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except msgspec.DecodeError as error:
                raise ApiError(f"structured_outputs.json is no JSON: {error}") from None
        return msgspec.json.encode(instance(schema, key, most)).decode()
    if "object" in structure:
        return '{"answer": "yes"}'
    raise ApiError(
        f"structured outputs by {next(iter(structure))} are not played; give json, choice or regex."
    )


def instance(schema: Any, key: int, most: int = MAX_CHARACTERS) -> Any:
    """A value that a JSON schema admits, as small as it may be; what lies behind `most` characters is null."""
    return _Maker(schema, most).make(schema, key, 0)


class _Maker:
    """Makes one value. All its parts share what it may have of parts and of characters."""

    def __init__(self, root: Any, most: int) -> None:
        self._root = root
        self._parts_left = _MAX_PARTS
        self._left = most
        """Characters; a value is charged for as many as it has at least."""
        self._found: dict[str, Any] = {}
        self._spelled: dict[str, str] = {}
        self._patterns_left = MAX_PATTERNS

    def make(self, schema: Any, key: int, depth: int) -> Any:
        self._parts_left -= 1
        self._left -= 1
        if depth > _MAX_DEPTH or self._parts_left < 0 or self._left < 0 or not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self.make(self._resolve(str(schema["$ref"])), key, depth + 1)
        if "const" in schema:
            return self._given(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._given(schema["enum"][key % len(schema["enum"])])
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self.make(schema[name][0], key, depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = kind[0] if kind else "null"
        if kind == "object":
            return self._object(schema.get("properties"), key, depth)
        if kind == "array":
            least = schema.get("minItems", 1)
            count = min(max(least if isinstance(least, int) else 1, 0), _MAX_ITEMS)
            return [self.make(schema.get("items", {}), key + place, depth + 1) for place in range(count)]
        if kind in ("integer", "number", "boolean", "null"):
            return _plain(kind, schema, key)
        return self._text(schema, key)

    def _object(self, properties: Any, key: int, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, part in properties.items() if isinstance(properties, dict) else ():
            if self._left < 0:
                break
            self._left -= len(name)
            made[name] = self.make(part, xxh3_64(str(name).encode("utf-8", "replace"), key), depth + 1)
        return made

    def _given(self, value: Any) -> Any:
        self._left -= len(msgspec.json.encode(value))
        return value

    def _text(self, schema: dict[str, Any], key: int) -> str:
        if isinstance(schema.get("pattern"), str):
            text = self._spell(schema["pattern"])
        else:
            words = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")
            text = words[key % len(words)]
            least = schema.get("minLength", 0)
            most = schema.get("maxLength", 1 << 16)
            if isinstance(least, int):
                text = text.ljust(min(least, 4096), "x")
            text = text[:most] if isinstance(most, int) else text
        text = text[: self._left]
        self._left -= len(text)
        return text

    def _spell(self, pattern: str) -> str:
        if pattern not in self._spelled:  # one may be asked for thousands of times
            self._patterns_left -= len(pattern)
            if self._patterns_left < 0:
                raise ApiError(
                    f"structured_outputs.json: its patterns have at most {MAX_PATTERNS} characters together."
                )
            self._spelled[pattern] = _matching(pattern, self._left)
        return self._spelled[pattern]

    def _resolve(self, reference: str) -> Any:
        if reference not in self._found:
            node = self._root
            for part in reference.removeprefix("#/").split("/"):
                node = node.get(part, {}) if isinstance(node, dict) else {}
            self._found[reference] = node
        return self._found[reference]


def _plain(kind: str, schema: dict[str, Any], key: int) -> Any:
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        least = least if isinstance(least, int | float) and not isinstance(least, bool) else 0
        if not abs(least) <= _MOST:  # NaN is not either
            raise ApiError(f"structured_outputs.json: a minimum must be a number of at most {_MOST:g}.")
        value = least + (1 if "exclusiveMinimum" in schema else 0)
        return int(value) if kind == "integer" else value
    return bool(key % 2) if kind == "boolean" else None


def _matching(pattern: Any, most: int) -> str:
    if not isinstance(pattern, str):
        raise ApiError("structured_outputs.regex must be a string.")
    if len(pattern) > MAX_PATTERN:
        raise ApiError(f"structured_outputs.regex: a pattern has at most {MAX_PATTERN} characters.")
    try:
        text = _spell(_parsed(pattern), most)
        text.encode()  # one may ask for half of a surrogate pair
        return text
    except (re.error, RecursionError, OverflowError, ValueError, KeyError) as error:
        raise ApiError(f"structured_outputs.regex cannot be read: {error}") from None


@lru_cache(maxsize=8)
def _parsed(pattern: str) -> Sequence[Any]:
    """All answers to a request go by the same ones."""
    parsed: Sequence[Any] = re._parser.parse(pattern)  # type: ignore[attr-defined]
    return parsed


_CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " "}


def _spell(parsed: Sequence[Any], most: int) -> str:
    """The shortest text that matches, more or less: the first branch, the fewest repeats. A very long one is cut."""
    out = ""
    for operation, value in parsed:
        name = str(operation)
        if name == "LITERAL":
            out += chr(value)
        elif name == "NOT_LITERAL":
            out += "a" if value != ord("a") else "b"
        elif name == "ANY":
            out += "a"
        elif name == "IN":
            out += _member(value)
        elif name == "BRANCH":
            out += _spell(value[1][0], most)
        elif name == "SUBPATTERN":
            out += _spell(value[3], most)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            part = _spell(value[2], most)
            out += part * min(int(value[0]), most // max(len(part), 1) + 1)
        elif name not in ("AT", "ASSERT", "ASSERT_NOT"):
            raise ValueError(f"{name.lower()} is not played")
        if len(out) > most:
            break
    return out[:most]


def _member(members: Sequence[Any]) -> str:
    first, value = str(members[0][0]), members[0][1]
    if first == "NEGATE":
        return "~"
    if first == "LITERAL":
        return chr(value)
    if first == "RANGE":
        return chr(value[0])
    return _CATEGORIES.get(str(value), "a")
