"""Require the optional properties of a schema, so that answers show them."""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("prefixItems", "anyOf", "allOf")
_MAX_REFERENCES = 200


def require_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its optional properties required.

    Those that refer back to a schema around them are left out, so that the answer ends. Parts of `oneOf` stay
    as they are: a value of one part must not be one of another.
    """
    required: dict[str, Any] = _Requiring(schema).of(schema, frozenset())
    return required


class _Requiring:
    def __init__(self, root: dict[str, Any]) -> None:
        targets = {name: _find(root, name) for name in _references(root)}
        self._names: dict[int, frozenset[str]] = {}
        for name, target in targets.items():
            self._names[id(target)] = self._names.get(id(target), frozenset()) | {name}
        below = {name: _references(target) for name, target in targets.items()}
        self._reached: dict[str, set[str]] = {}
        all_targets = set(targets)
        if len(targets) > _MAX_REFERENCES:  # too many to follow: as if each reached all
            self._reached = dict.fromkeys(targets, all_targets)
            return
        for name in targets:
            found, todo = {name}, [name]
            while todo:
                new = below.get(todo.pop(), set()) - found
                found |= new
                todo.extend(new)
            self._reached[name] = found

    def of(self, schema: Any, around: frozenset[str]) -> Any:
        """Return a part of the schema, inside the targets of the references `around`."""
        if not isinstance(schema, dict):
            return schema
        around |= self._names.get(id(schema), frozenset())
        out = dict(schema)
        for name in _SCHEMAS:
            if name in out:
                out[name] = self.of(out[name], around)
        for name in _LISTS:
            if isinstance(out.get(name), list):
                out[name] = [self.of(part, around) for part in out[name]]
        for name in _MAPS:
            if isinstance(out.get(name), dict):
                out[name] = {key: self.of(part, around) for key, part in out[name].items()}
        named, needed = schema.get("properties"), schema.get("required", [])
        if isinstance(named, dict) and isinstance(needed, list):
            more = []
            for key, part in named.items():
                if key in needed or part is False:
                    continue
                if self._refers_back(part, around):
                    out["properties"][key] = False
                else:
                    more.append(key)
            if more:
                out["required"] = [*needed, *more]
        return out

    def _refers_back(self, part: Any, around: frozenset[str]) -> bool:
        return bool(around) and any(self._reached.get(name, set()) & around for name in _references(part))


def _references(schema: Any) -> set[str]:
    """Return all references in a schema."""
    found, todo = set(), [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                found.add(part["$ref"])
            todo.extend(part.values())
        elif isinstance(part, list):
            todo.extend(part)
    return found


def _find(root: Any, reference: str) -> Any:
    node = root
    for step in reference.partition("#")[2].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node
