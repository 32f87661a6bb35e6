"""Shapes that the schemas are made of."""

from __future__ import annotations

from typing import Any

import msgspec

Schema = dict[str, Any]
COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
MAYBE: Schema = {"type": ["number", "null"]}
TEXT: Schema = {"type": "string"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}


def describe_object(title: str, properties: Schema, optional: Schema | None = None) -> Schema:
    """Describe an object with these keys and no others."""
    return {
        "title": title,
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(item: Schema) -> Schema:
    """Describe a list of equal items."""
    return {"type": "array", "items": item}


def describe_type(kind: Any, defs: Schema) -> Schema:
    """Describe what is written of a type: all fields, NaN as null. The types that it contains go to `defs`."""

    def adapt(node: Any) -> Any:
        if isinstance(node, list):
            return [adapt(one) for one in node]
        if not isinstance(node, dict):
            return node
        node = {key: adapt(value) for key, value in node.items() if key not in ("default", "description")}
        if node.get("type") == "number":
            node["type"] = ["number", "null"]
        if "properties" in node:
            node |= {"required": list(node["properties"]), "additionalProperties": False}
        return node

    (described,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    defs.update({name: adapt(component) for name, component in components.items()})
    result: Schema = adapt(described)
    return result
