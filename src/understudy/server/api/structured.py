"""Answers that have a given form: made from the form alone, the same every time."""

from __future__ import annotations

import re
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
_MAX_CHARACTERS = 1 << 17
"""Of a text that a pattern asks for; no answer is as long."""


def structured_text(structure: dict[str, Any], key: int) -> str:
    """A text of the form. ApiError names a form that cannot be made."""
    if "choice" in structure:
        choices = structure["choice"]
        if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
            raise ApiError("structured_outputs.choice must be a list of strings, with at least one.")
        return str(choices[key % len(choices)])
    if "regex" in structure:
        return _matching(structure["regex"])
    if "json" in structure:
        schema = structure["json"]
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except msgspec.DecodeError as error:
                raise ApiError(f"structured_outputs.json is no JSON: {error}") from None
        return msgspec.json.encode(instance(schema, key)).decode()
    if "object" in structure:
        return '{"answer": "yes"}'
    raise ApiError(
        f"structured outputs by {next(iter(structure))} are not played; give json, choice or regex."
    )


def instance(schema: Any, key: int) -> Any:
    """A value that a JSON schema admits, as small as it may be."""
    return _Maker(schema).make(schema, key, 0)


class _Maker:
    """Makes one value."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_PARTS

    def make(self, schema: Any, key: int, depth: int) -> Any:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0 or not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self.make(_resolve(schema["$ref"], self._root), key, depth + 1)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][key % len(schema["enum"])]
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self.make(schema[name][0], key, depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = kind[0] if kind else "null"
        if kind == "object":
            properties = schema.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            return {
                name: self.make(part, xxh3_64(str(name).encode("utf-8", "replace"), key), depth + 1)
                for name, part in properties.items()
            }
        if kind == "array":
            least = schema.get("minItems", 1)
            count = min(max(least if isinstance(least, int) else 1, 0), _MAX_ITEMS)
            return [self.make(schema.get("items", {}), key + place, depth + 1) for place in range(count)]
        return _scalar(kind, schema, key)


def _scalar(kind: Any, schema: dict[str, Any], key: int) -> Any:
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        least = least if isinstance(least, int | float) and not isinstance(least, bool) else 0
        value = least + (1 if "exclusiveMinimum" in schema else 0)
        return int(value) if kind == "integer" else value
    if kind == "boolean":
        return bool(key % 2)
    if kind == "null":
        return None
    if isinstance(schema.get("pattern"), str):
        return _matching(schema["pattern"])
    words = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")
    text = words[key % len(words)]
    least = schema.get("minLength", 0)
    most = schema.get("maxLength", 1 << 16)
    if isinstance(least, int):
        text = text.ljust(min(least, 4096), "x")
    return text[:most] if isinstance(most, int) else text


def _resolve(reference: Any, root: Any) -> Any:
    node = root
    for part in str(reference).removeprefix("#/").split("/"):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return node


def _matching(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise ApiError("structured_outputs.regex must be a string.")
    try:
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
        return _spell(parsed)
    except (re.error, RecursionError, OverflowError, ValueError, KeyError) as error:
        raise ApiError(f"structured_outputs.regex cannot be read: {error}") from None


_CATEGORIES = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " "}


def _spell(parsed: Sequence[Any]) -> str:
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
            out += _spell(value[1][0])
        elif name == "SUBPATTERN":
            out += _spell(value[3])
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            part = _spell(value[2])
            out += part * min(int(value[0]), _MAX_CHARACTERS // max(len(part), 1) + 1)
        elif name not in ("AT", "ASSERT", "ASSERT_NOT"):
            raise ValueError(f"{name.lower()} is not played")
        if len(out) > _MAX_CHARACTERS:
            break
    return out[:_MAX_CHARACTERS]


def _member(members: Sequence[Any]) -> str:
    first, value = str(members[0][0]), members[0][1]
    if first == "NEGATE":
        return "~"
    if first == "LITERAL":
        return chr(value)
    if first == "RANGE":
        return chr(value[0])
    return _CATEGORIES.get(str(value), "a")
