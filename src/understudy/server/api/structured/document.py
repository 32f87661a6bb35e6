"""A JSON schema as a document: all its parts are checked once, and its references resolved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from understudy.server.api.structured.errors import FormError, Steps
from understudy.server.api.structured.formats import FORMATS
from understudy.server.api.structured.pattern import Pattern, PatternReader
from understudy.server.api.structured.regex import Expressions
from understudy.server.api.structured.values import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Schema = dict[str, Any] | bool
MAX_PARTS = 20_000
"""Schemas within a schema."""
MAX_PATTERNS = 1 << 16
"""Characters of all patterns of a schema together."""
_MOST = 1e300
_MAX_NAMES = 16
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "$schema", "$id", "$comment"),
        *("deprecated", "readOnly", "writeOnly"),
    )
)
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "$defs", "definitions")
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas concern the same value."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"must be one of {', '.join(TYPES)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and value != [], "must be a list, not an empty one"),
    "const": (lambda _: True, ""),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "must be a list of strings",
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "must be a whole number, 0 or more"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        (_is_number, f"must be a number of at most {_MOST:g}"),
    ),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "must be a positive number"),
    "uniqueItems": (lambda value: isinstance(value, bool), "must be true or false"),
    "pattern": (lambda value: isinstance(value, str), "must be a string"),
    "format": (
        lambda value: isinstance(value, str) and value in FORMATS,
        f"this format is not supported; choose one of {', '.join(FORMATS)}",
    ),
    "$ref": (lambda value: isinstance(value, str), "must be a string"),
}


class Document:
    """One schema, checked. FormError names the first keyword that is not supported or has a wrong value."""

    def __init__(self, root: Any) -> None:
        self.root: Schema = root
        self.keywords: set[str] = set()
        """All keywords in use."""
        self.names: dict[str, None] = {}
        """Properties that schemas name, some of them."""
        self.expressions = Expressions()
        self._reader = PatternReader(self.expressions)
        self._patterns: dict[str, Pattern] = {}
        self._formats: dict[str, Pattern] = {}
        self._steps = Steps()
        self._checked: dict[int, Schema] = {}
        self._targets: dict[str, Schema] = {}
        self._heights: dict[int, float] | None = None
        self._check(root, "", nested_id=False)
        self._check_cycles()

    def pattern(self, text: str) -> Pattern:
        """Return a pattern of the schema, for whole texts."""
        return self._patterns[text]

    def format(self, name: str) -> Pattern:
        """Return the pattern of a format, for whole texts."""
        return self._formats[name]

    def resolve(self, reference: str) -> Schema:
        """Return the schema that a `$ref` of this document refers to."""
        return self._targets[reference]

    def owns(self, schemas: Iterable[Schema]) -> bool:
        """Return whether all schemas are parts of this document, and so live as long as it does."""
        return all(isinstance(schema, bool) or id(schema) in self._checked for schema in schemas)

    # ── Checks ──

    def _check(self, schema: Any, parent: str, *, nested_id: bool) -> None:
        """Check a schema and all below it."""
        todo = [(schema, parent, nested_id)]
        while todo:
            schema, parent, nested_id = todo.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise FormError(parent or "schema", "must be a schema: an object, true or false")
            if id(schema) in self._checked:
                continue
            self._checked[id(schema)] = schema
            if len(self._checked) > MAX_PARTS:
                raise FormError(
                    parent or "schema", f"the schema has more than {MAX_PARTS} parts; simplify it"
                )
            if len(self.names) < _MAX_NAMES and isinstance(schema.get("properties"), dict):
                self.names |= dict.fromkeys(schema["properties"])
            nested_id = nested_id or ("$id" in schema and schema is not self.root)
            for keyword, value in schema.items():
                if keyword not in ANNOTATIONS:
                    self.keywords.add(keyword)
                    self._check_value(keyword, value)
            if nested_id and "$ref" in schema:
                raise FormError("$id", "is only supported at the root of a schema with $ref; leave it out")
            todo += [(part, name, nested_id) for name, part in children(schema)]
            if "$ref" in schema:
                todo.append((self._find(schema["$ref"]), "$ref", nested_id))

    def _check_value(self, keyword: str, value: Any) -> None:
        if keyword in _SCHEMAS:
            return
        if keyword in _LISTS:
            if not isinstance(value, list) or not value:
                raise FormError(keyword, "must be a list of schemas, not an empty one")
        elif keyword in _MAPS:
            if not isinstance(value, dict):
                raise FormError(keyword, "must be an object of schemas")
        elif keyword not in _VALUES:
            raise FormError(keyword, "this keyword is not supported; leave it out")
        elif not _VALUES[keyword][0](value):
            raise FormError(keyword, _VALUES[keyword][1])
        if keyword in ("enum", "const"):
            _check_json(keyword, value)
        elif keyword == "pattern" and value not in self._patterns:
            self._patterns[value] = self._read(keyword, value, whole=False)
            if sum(map(len, self._patterns)) > MAX_PATTERNS:
                raise FormError(keyword, f"all patterns have at most {MAX_PATTERNS} characters together")
        elif keyword == "format" and value not in self._formats:
            self._formats[value] = self._read(keyword, FORMATS[value].pattern, whole=True)

    def _read(self, keyword: str, text: str, *, whole: bool) -> Pattern:
        try:
            return self._reader.read(text, whole=whole, steps=self._steps)
        except ValueError as error:
            raise FormError(keyword, str(error)) from None

    def _find(self, reference: str) -> Any:
        if reference in self._targets:
            return self._targets[reference]
        base, _, pointer = reference.partition("#")
        own = self.root.get("$id") if isinstance(self.root, dict) else None
        if base and base != own:
            raise FormError("$ref", f"{reference[:200]!r} is outside of the schema; put it into $defs")
        node: Any = self.root
        for part in pointer.split("/")[1:] if pointer.startswith("/") else [pointer] if pointer else []:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node and pointer.startswith("/"):
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                raise FormError("$ref", f"{reference[:200]!r} names no part of the schema")
        self._targets[reference] = node
        return node

    def _check_cycles(self) -> None:
        """Refuse references that lead back to themselves without a step into the value."""
        done: set[int] = set()
        for start in self._checked.values():
            if id(start) in done:
                continue
            open_ids = {id(start)}
            stack = [(start, self._same_value(start))]
            while stack:
                schema, below = stack[-1]
                part = next(below, None)
                if part is None:
                    stack.pop()
                    open_ids.discard(id(schema))
                    done.add(id(schema))
                elif id(part) in open_ids:
                    raise FormError("$ref", "refers to itself; refer from below properties or items")
                elif id(part) not in done:
                    open_ids.add(id(part))
                    stack.append((part, self._same_value(part)))

    def _same_value(self, schema: Schema) -> Iterator[Schema]:
        """Yield the schemas that concern the same value."""
        if isinstance(schema, dict):
            for name in IN_PLACE:
                yield from (part for part in schema.get(name, ()) if isinstance(part, dict))
            if "$ref" in schema and isinstance(target := self.resolve(schema["$ref"]), dict):
                yield target

    # ── Heights ──

    def height(self, schema: Schema) -> float:
        """Return about how many levels the flattest value of a schema has; infinite if it never ends."""
        if self._heights is None:
            heights = self._heights = dict.fromkeys(self._checked, math.inf)
            for _ in range(64):
                before = dict(heights)
                for one in self._checked.values():
                    heights[id(one)] = self._height(one)
                if heights == before:
                    break
        return self._height(schema)

    def _height(self, schema: Schema) -> float:
        if isinstance(schema, bool) or "const" in schema or "enum" in schema:
            return 0
        heights = self._heights or {}

        def of(part: Schema) -> float:
            return heights.get(id(part), 0.0) if isinstance(part, dict) else 0.0

        found = [0.0, *map(of, schema.get("allOf", ()))]
        found += [min(map(of, schema[name])) for name in ("anyOf", "oneOf") if name in schema]
        if "$ref" in schema:
            found.append(of(self.resolve(schema["$ref"])))
        types = schema.get("type", "null")
        if types in ("object", ["object"]):
            known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
            found.append(
                1 + max((of(known.get(name, other)) for name in schema.get("required", ())), default=0)
            )
        elif types in ("array", ["array"]) and schema.get("minItems", 0):
            first = [*schema.get("prefixItems", ()), schema.get("items", True)][: int(schema["minItems"])]
            found.append(1 + max(map(of, first)))
        return max(found)


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within a schema, each with its keyword."""
    for name, value in schema.items():
        if name in _SCHEMAS:
            yield name, value
        elif name in _LISTS:
            yield from ((name, part) for part in value)
        elif name in _MAPS:
            yield from ((name, part) for part in value.values())


def _check_json(keyword: str, value: Any) -> None:
    try:
        msgspec.json.encode(value).decode()
    except (ValueError, OverflowError, RecursionError) as error:
        raise FormError(keyword, f"has a value that JSON cannot say: {error}") from None
