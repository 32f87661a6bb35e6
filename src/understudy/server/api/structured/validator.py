"""The check of a value against a schema: every answer passes it before it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.structured.formats import FORMATS
from understudy.server.api.structured.values import TYPES, identity, is_multiple, kind_of

if TYPE_CHECKING:
    from understudy.server.api.structured.document import Document, Schema
    from understudy.server.api.structured.errors import Steps


class _Undecided(Exception):
    """A text may or may not match a pattern with back-references."""


class Validator:
    """Check values against the schemas of one document, and against their negations (`not`)."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: dict[tuple[int, int], str] = {}
        """Results of the current check: references may lead to one schema by many ways."""
        self._identities: dict[int, tuple[Any, frozenset[Any]]] = {}
        self.steps: Steps

    def is_valid(self, value: Any, schema: Schema) -> bool:
        """Return whether the schema certainly admits the value."""
        return not self.broken(value, schema)

    def broken(self, value: Any, schema: Schema) -> str:
        """Return a keyword of the schema that the value breaks or may break, or an empty string."""
        self._seen.clear()
        try:
            return self._broken(value, schema)
        except _Undecided:
            return "pattern"

    def _broken(self, value: Any, schema: Schema) -> str:
        if isinstance(schema, bool):
            return "" if schema else "false"
        key = id(value), id(schema)  # both live as long as the check
        found = self._seen.get(key)
        if found is None:
            self.steps.take()
            found = self._in_place(value, schema) or self._own(value, kind_of(value), schema)
            self._seen[key] = found
        return found

    def _in_place(self, value: Any, schema: dict[str, Any]) -> str:
        if "$ref" in schema and (name := self._broken(value, self._document.resolve(schema["$ref"]))):
            return name
        for part in schema.get("allOf", ()):
            if name := self._broken(value, part):
                return name
        if "anyOf" in schema and not any(not self._broken(value, part) for part in schema["anyOf"]):
            return "anyOf"
        if "oneOf" in schema and sum(not self._broken(value, part) for part in schema["oneOf"]) != 1:
            return "oneOf"
        if "not" in schema and not self._broken(value, schema["not"]):
            return "oneOf"  # the only keyword that makes negations
        return ""

    def _own(self, value: Any, kind: str, schema: dict[str, Any]) -> str:
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not any(kind in TYPES[name] for name in types):
                return "type"
        if "const" in schema and identity(value) != identity(schema["const"]):
            return "const"
        if "enum" in schema and identity(value) not in self._members(schema["enum"]):
            return "enum"
        match kind:
            case "string":
                return self._string(value, schema)
            case "integer" | "fraction":
                return _number(value, schema)
            case "array":
                return self._array(value, schema)
            case "object":
                return self._object(value, schema)
        return ""

    def _members(self, values: list[Any]) -> frozenset[Any]:
        found = self._identities.get(id(values))
        if found is None:  # the list is kept, so that no other one gets its id
            found = self._identities[id(values)] = (values, frozenset(map(identity, values)))
        return found[1]

    def _string(self, value: str, schema: dict[str, Any]) -> str:
        if len(value) < schema.get("minLength", 0):
            return "minLength"
        if len(value) > schema.get("maxLength", len(value)):
            return "maxLength"
        if "format" in schema and not FORMATS[schema["format"]].check(value):
            return "format"
        if "pattern" in schema:
            node, outer = self._document.pattern(schema["pattern"])
            matches = self._document.expressions.matches
            if not matches(node, value, self.steps):
                if outer is not node and matches(outer, value, self.steps):
                    raise _Undecided
                return "pattern"
        return ""

    def _array(self, value: list[Any], schema: dict[str, Any]) -> str:
        if len(value) < schema.get("minItems", 0):
            return "minItems"
        if len(value) > schema.get("maxItems", len(value)):
            return "maxItems"
        if schema.get("uniqueItems") and len(set(map(identity, value))) < len(value):
            return "uniqueItems"
        first = schema.get("prefixItems", ())
        for item, part in zip(value, first, strict=False):
            if name := self._broken(item, part):
                return "prefixItems" if name == "false" else name
        if "items" in schema:
            for item in value[len(first) :]:
                if name := self._broken(item, schema["items"]):
                    return "items" if name == "false" else name
        return ""

    def _object(self, value: dict[str, Any], schema: dict[str, Any]) -> str:
        if len(value) < schema.get("minProperties", 0):
            return "minProperties"
        if len(value) > schema.get("maxProperties", len(value)):
            return "maxProperties"
        if any(name not in value for name in schema.get("required", ())):
            return "required"
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        for name, part in value.items():
            if broken := self._broken(part, known.get(name, other)):
                keyword = "properties" if name in known else "additionalProperties"
                return keyword if broken == "false" else broken
        return ""


def _number(value: float, schema: dict[str, Any]) -> str:
    if "minimum" in schema and value < schema["minimum"]:
        return "minimum"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return "exclusiveMinimum"
    if "maximum" in schema and value > schema["maximum"]:
        return "maximum"
    if "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"]:
        return "exclusiveMaximum"
    if "multipleOf" in schema and not is_multiple(value, schema["multipleOf"]):
        return "multipleOf"
    return ""
