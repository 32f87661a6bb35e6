"""The intersection of several schemas: all constraints on one value."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.server.api.structured.negation import Check
from understudy.server.api.structured.values import KINDS, TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.server.api.structured.document import Schema

_HINTS = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class Bound(NamedTuple):
    """One end of a range of numbers."""

    value: Fraction
    is_open: bool
    """The end itself is not in the range."""
    keyword: str


class Counts:
    """The range of a length or a count, with the keywords that gave it."""

    def __init__(self, name: str) -> None:
        self.low, self.high = 0, math.inf
        self._name = name
        self.low_keyword = self.high_keyword = ""

    def narrow(self, schema: dict[str, Any]) -> None:
        """Apply the schema's minimum and maximum."""
        if schema.get(f"min{self._name}", 0) > self.low:
            self.low, self.low_keyword = int(schema[f"min{self._name}"]), f"min{self._name}"
        if schema.get(f"max{self._name}", math.inf) < self.high:
            self.cap(int(schema[f"max{self._name}"]), f"max{self._name}")

    def cap(self, high: int, keyword: str) -> None:
        """Lower the maximum."""
        if high < self.high:
            self.high, self.high_keyword = high, keyword


class Constraints:
    """The intersection of schemas without `$ref`, `allOf`, `anyOf`, `oneOf`, `enum` and `const`."""

    def __init__(self, schemas: Iterable[dict[str, Any] | Check]) -> None:
        self.kinds: list[str] = list(KINDS)
        """Kinds of values that are possible, the preferred first."""
        self.conflict = ""
        """A keyword that made a kind impossible."""
        self.low: Bound | None = None
        self.high: Bound | None = None
        self.multiples: list[float] = []
        self.lengths, self.items, self.properties = Counts("Length"), Counts("Items"), Counts("Properties")
        self.patterns: dict[str, None] = {}
        self.other_patterns: dict[str, None] = {}
        self.formats: dict[str, None] = {}
        self.is_unique = False
        self.has_twins = False
        """Two items must be equal."""
        self.required: dict[str, None] = {}
        self.checks: list[Check] = []
        self._arrays: list[tuple[list[Schema], Schema]] = []
        self._objects: list[tuple[dict[str, Schema], Schema]] = []
        hints: dict[str, None] = {}
        for schema in schemas:
            if isinstance(schema, Check):
                self.checks.append(schema)
            else:
                self._add(schema)
                hints |= dict.fromkeys(
                    kind for kind, names in _HINTS.items() if not schema.keys().isdisjoint(names)
                )
        if len(self.kinds) == len(KINDS):
            self.kinds = [*hints, *(kind for kind in KINDS if kind not in hints)]
        self._find_conflicts()

    def _add(self, schema: dict[str, Any]) -> None:
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            named = dict.fromkeys(kind for name in types for kind in TYPES[name])
            if len(self.kinds) == len(KINDS):
                self.kinds = list(named)
            self._keep(named, "type")
        if "kinds" in schema:
            self._keep(schema["kinds"], "oneOf")
        for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if keyword in schema:
                self._bound(Bound(Fraction(schema[keyword]), keyword.startswith("e"), keyword))
        if "multipleOf" in schema:
            self.multiples.append(schema["multipleOf"])
        for counts in (self.lengths, self.items, self.properties):
            counts.narrow(schema)
        for keyword, kept in (
            ("pattern", self.patterns),
            ("notPattern", self.other_patterns),
            ("format", self.formats),
        ):
            if keyword in schema:
                kept[schema[keyword]] = None
        self.is_unique = self.is_unique or schema.get("uniqueItems", False)
        self.has_twins = self.has_twins or "twins" in schema
        if "prefixItems" in schema or "items" in schema:
            self._arrays.append((schema.get("prefixItems", []), schema.get("items", True)))
        if "properties" in schema or "additionalProperties" in schema:
            self._objects.append((schema.get("properties", {}), schema.get("additionalProperties", True)))
        self.required |= dict.fromkeys(schema.get("required", ()))

    def _keep(self, kinds: Iterable[str], keyword: str) -> None:
        allowed = set(kinds)
        if not allowed.issuperset(self.kinds):
            self.conflict = keyword
            self.kinds = [kind for kind in self.kinds if kind in allowed]

    def _drop(self, kinds: tuple[str, ...], keyword: str) -> None:
        self._keep([kind for kind in self.kinds if kind not in kinds], keyword)

    def _bound(self, bound: Bound) -> None:
        if bound.keyword in ("minimum", "exclusiveMinimum"):
            if self.low is None or (bound.value, bound.is_open) > (self.low.value, self.low.is_open):
                self.low = bound
        elif self.high is None or (-bound.value, bound.is_open) > (-self.high.value, self.high.is_open):
            self.high = bound

    def _find_conflicts(self) -> None:
        """Drop the kinds of which no value can be."""
        low, high = self.low, self.high
        if low and high and (low.value, low.is_open or high.is_open) > (high.value, False):
            self._drop(("integer", "fraction"), low.keyword)
        for place in range(self.prefix + 1):
            if False in self.schemas_at(place):
                self.items.cap(place, "items")
        for name in self.required:
            schemas = self.schemas_of(name)
            if False in schemas:
                self._drop(("object",), "required")
            elif any(isinstance(one, dict) and "not" in one and one["not"] in schemas for one in schemas):
                self._drop(("object",), "oneOf")
        if len(self.required) > self.properties.high:
            self._drop(("object",), self.properties.high_keyword)
        if self.is_unique and self.has_twins:
            self._drop(("array",), "uniqueItems")
        for kind, counts in (("string", self.lengths), ("array", self.items), ("object", self.properties)):
            if counts.low > counts.high:
                self._drop((kind,), counts.low_keyword)

    # ── Parts of containers ──

    @property
    def prefix(self) -> int:
        """Number of items that may have schemas of their own."""
        return max((len(first) for first, _ in self._arrays), default=0)

    @property
    def names(self) -> list[str]:
        """All properties that a schema names, in order."""
        named = dict.fromkeys(name for known, _ in self._objects for name in known)
        return list(named | self.required)

    def schemas_at(self, place: int) -> list[Schema]:
        """Return the schemas of the item at a place."""
        found = (first[place] if place < len(first) else rest for first, rest in self._arrays)
        return [schema for schema in found if schema is not True]

    def schemas_of(self, name: str) -> list[Schema]:
        """Return the schemas of a property."""
        found = (known.get(name, other) for known, other in self._objects)
        return [schema for schema in found if schema is not True]
