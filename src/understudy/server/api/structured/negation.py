"""The opposite of a schema, as alternatives: each breaks one keyword of it.

`oneOf` needs them: one schema is met, all others are broken. The alternatives are schemas themselves, with four
keywords that only this package writes: `not`, `kinds` (of `values.KINDS`), `notPattern` and `twins` (equal items).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.structured.values import KINDS, TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.server.api.structured.document import Document, Schema

_MAX_PAIRS = 64
_NUMBERS = ["integer", "fraction"]
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


class Check(NamedTuple):
    """A schema that no construction aims at: up to `tries` values are made until one passes."""

    schema: Schema
    tries: int


Part = dict[str, Any] | bool | Check


def opposite(schema: Schema, document: Document) -> Iterator[list[Part]]:
    """Yield alternatives; a value that meets all parts of one breaks the schema."""
    if isinstance(schema, bool):
        if not schema:
            yield []
        return
    for keyword, value in schema.items():
        yield from _break_in_place(keyword, value, document)
        yield from _break_scalar(keyword, value)
        if keyword in ("prefixItems", "items", "uniqueItems"):
            yield from _break_array(keyword, value, schema)
        elif keyword in ("required", "properties", "additionalProperties"):
            yield from _break_object(keyword, value, schema, document)


def _break_in_place(keyword: str, value: Any, document: Document) -> Iterator[list[Part]]:
    match keyword:
        case "$ref":
            yield [{"not": document.resolve(value)}]
        case "not":
            yield [value]
        case "allOf":
            for part in value:
                yield [{"not": part}]
        case "anyOf":
            yield [{"not": part} for part in value]
        case "oneOf":
            yield [{"not": part} for part in value]
            for pair, _ in zip(combinations(value, 2), range(_MAX_PAIRS), strict=False):
                yield list(pair)


def _break_scalar(keyword: str, value: Any) -> Iterator[list[Part]]:
    if keyword in _BOUNDS:
        yield [{"kinds": _NUMBERS, _BOUNDS[keyword]: value}]
    elif keyword in _COUNTS:
        kind, other, step = _COUNTS[keyword]
        if value + step >= 0:
            yield [{"kinds": [kind], other: int(value) + step}]
    elif keyword == "type":
        types = value if isinstance(value, list) else [value]
        kept = {kind for name in types for kind in TYPES[name]}
        yield [{"kinds": [kind for kind in KINDS if kind not in kept]}]
    elif keyword == "pattern":
        yield [{"kinds": ["string"], "notPattern": value}]
    elif keyword in ("enum", "const", "multipleOf", "format"):
        kinds = {"multipleOf": _NUMBERS, "format": ["string"]}.get(keyword, list(KINDS))
        yield [{"kinds": kinds}, Check({"not": {keyword: value}}, 256)]


def _break_array(keyword: str, value: Any, schema: dict[str, Any]) -> Iterator[list[Part]]:
    first = schema.get("prefixItems", [])
    if keyword == "uniqueItems" and value:
        yield [{"kinds": ["array"], "minItems": 2, "twins": True}]
    elif keyword == "items":
        items = [*[True] * len(first), {"not": value}]
        yield [{"kinds": ["array"], "minItems": len(items), "prefixItems": items}]
    elif keyword == "prefixItems":
        for place, part in enumerate(value):
            items = [*[True] * place, {"not": part}]
            yield [{"kinds": ["array"], "minItems": place + 1, "prefixItems": items}]


def _break_object(
    keyword: str, value: Any, schema: dict[str, Any], document: Document
) -> Iterator[list[Part]]:
    known = schema.get("properties", {})
    if keyword == "required":
        for name in value:
            yield [{"kinds": ["object"], "properties": {name: False}}]
        return
    if keyword == "properties":
        broken = value
    else:
        broken = {name: value for name in [*document.names, "extra"] if name not in known}
    for name, part in broken.items():
        yield [{"kinds": ["object"], "required": [name], "properties": {name: {"not": part}}}]
