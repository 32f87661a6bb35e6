"""Random JSON schemas: arbitrary ones, and ones built around a value that they admit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

NAMES = ("a", "b", "kind", "next", "p q", "é")
FORMATTED = {
    "date-time": ("2024-02-29T12:30:00Z", "1999-12-31t23:59:59.5+01:00"),
    "date": ("2024-02-29", "0001-01-31"),
    "time": ("23:59:59Z", "00:00:00.25-11:30"),
    "email": ("x@y.zz", "first.last+tag@mail.example.org"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-426614174000"),
    "uri": ("https://example.org:8080/a/b?c=d#e", "urn:isbn:0451450523"),
    "ipv4": ("10.0.0.255", "8.8.8.8"),
    "ipv6": ("2001:db8::ff00:42:8329", "::1"),
}
PATTERNS = (
    *("^[a-z]+$", "[0-9]{2,3}", "^(foo|bar)*$", "a.c", "^.{2,6}$", "x|y|zz", r"^\d{3}-\w+$", r"\bword\b"),
    *(
        "^(a|b){2,}c?$",
        "^[^a-y]*$",
        r"^\S+@\S+$",
        "(ab)+$",
        "^$",
        r"^(\w)\1$",
        "^(?:a{1,3}b{2}){1,2}$",
        "[A-F]",
    ),
)
DIVISORS = (1, 2, 3, 7, 0.01, 0.1, 0.5, 2.5, 0.25, 10, 1e-3)


def is_valid(schema: Any, value: Any) -> bool:
    """Return whether the reference implementation admits the value."""
    checker = Draft202012Validator.FORMAT_CHECKER
    return bool(Draft202012Validator(schema, format_checker=checker).is_valid(value))


# ── Arbitrary schemas ──


def arbitrary(rng: Random, depth: int = 3) -> Any:
    """Return a schema of random keywords, which may contradict each other; half of the time those of one type."""
    if rng.random() < 0.04:
        return rng.random() < 0.8
    schema: dict[str, Any] = {}
    keywords = list(KEYWORDS)
    if rng.random() < 0.5:
        kind = rng.choice([kind for kind in OF_TYPE if depth > 0 or kind not in ("array", "object")])
        schema["type"] = kind
        keywords = [*OF_TYPE[kind], "anyOf", "oneOf", "allOf"]
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        keyword = rng.choice(keywords)
        if depth > 0 or keyword not in NESTED:
            schema[keyword] = KEYWORDS[keyword](rng, depth - 1)
    if depth == 3 and rng.random() < 0.3:
        schema["$defs"] = {"d": arbitrary(rng, 1), "tree": _tree(rng)}
        schema.setdefault("properties", {})["a"] = {"$ref": rng.choice(("#/$defs/d", "#/$defs/tree"))}
    return schema


def _tree(rng: Random) -> dict[str, Any]:
    below = {"$ref": "#/$defs/tree"}
    shape = rng.choice(("list", "link", "optional"))
    shapes: dict[str, dict[str, Any]] = {
        "list": {"type": "array", "items": below},
        "link": {"anyOf": [below, {"type": "null"}]},
        "optional": below,
    }
    needed = [] if shape == "optional" else ["next"]
    return {
        "type": "object",
        "properties": {"next": shapes[shape], "v": arbitrary(rng, 1)},
        "required": needed,
    }


def _number(rng: Random, _: int) -> float:
    return rng.choice((0, 1, -3, 2.5, 10, 0.07, -1e3))


def _few(rng: Random, _: int) -> int:
    return rng.randint(0, 4)


def _some(rng: Random, depth: int) -> list[Any]:
    return [arbitrary(rng, depth) for _ in range(rng.randint(1, 3))]


def _type(rng: Random, _: int) -> Any:
    kinds = ("string", "integer", "number", "boolean", "null", "array", "object")
    return rng.choice((rng.choice(kinds), rng.sample(kinds, 2)))


KEYWORDS: dict[str, Callable[[Random, int], Any]] = {
    "type": _type,
    "enum": lambda rng, _: [value(rng, 1) for _ in range(3)],
    "const": lambda rng, _: value(rng, 1),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
    "multipleOf": lambda rng, _: rng.choice(DIVISORS),
    **dict.fromkeys(("minLength", "minItems", "maxItems", "minProperties", "maxProperties"), _few),
    "maxLength": lambda rng, _: rng.randint(0, 12),
    "pattern": lambda rng, _: rng.choice(PATTERNS),
    "format": lambda rng, _: rng.choice(list(FORMATTED)),
    "uniqueItems": lambda rng, _: rng.random() < 0.8,
    "required": lambda rng, _: rng.sample(NAMES, rng.randint(0, 2)),
    "properties": lambda rng, depth: {name: arbitrary(rng, depth) for name in rng.sample(NAMES, 2)},
    "additionalProperties": lambda rng, depth: rng.choice((True, False, arbitrary(rng, depth))),
    "items": arbitrary,
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), _some),
    **{name: lambda _rng, _: "text" for name in ("title", "description", "$comment", "default")},
    "examples": lambda _rng, _: [1],
    "deprecated": lambda _rng, _: True,
}
NESTED = ("properties", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf")
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "pattern", "format", "enum"),
    **dict.fromkeys(
        ("integer", "number"),
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "multipleOf", "enum"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}


# ── Schemas around a value ──


def value(rng: Random, depth: int = 3) -> Any:
    """Return a random JSON value."""
    kind = rng.choice(("string", "string", "number", "integer", "boolean", "null", "array", "object"))
    if kind == "string":
        some = rng.choice(list(FORMATTED.values()))
        return rng.choice(("", "a", "foo", "foobar", "abc-12", "Zz9", "x y", "é日", '"\\/<|im_end|>', *some))
    if kind == "number":
        return rng.choice((0.5, -2.75, 19.99, 0.07, 1e-3, 2.0, 123456.789, -1e6, 0.1))
    if kind == "integer":
        return rng.choice((0, 1, -1, 7, 42, -100, 2**40, 99))
    if kind in ("boolean", "null") or depth == 0:
        return rng.choice((True, False, None))
    parts = [value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return parts if kind == "array" else dict(zip(rng.sample(NAMES, len(parts)), parts, strict=True))


def around(rng: Random, known: Any, depth: int = 3) -> Any:
    """Return a schema that admits the value, by the reference implementation."""
    if rng.random() < 0.05:
        return True
    if rng.random() < 0.06:
        return {"const": known}
    if rng.random() < 0.08:
        values = [value(rng, 1), known, value(rng, 1)]
        return {"enum": values}
    schema: dict[str, Any] = {}
    for part in _around_kind(rng, known, depth):
        if rng.random() < 0.5 and is_valid(part, known):
            schema |= part
    if rng.random() < 0.8:
        schema |= {"type": _types_of(rng, known)}
    if depth > 0 and rng.random() < 0.35:
        schema |= _combined(rng, known, depth)
    return schema


def document_around(rng: Random, known: Any) -> Any:
    """Return a schema around the value, some of whose parts are behind references."""
    schema = around(rng, known)
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}

    def move(part: Any) -> Any:
        if isinstance(part, dict) and rng.random() < 0.3:
            name = f"d{len(moved)}"
            moved[name] = part
            return {"$ref": f"#/$defs/{name}"}
        return part

    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        if keyword in schema:
            schema[keyword] = [move(part) for part in schema[keyword]]
    if isinstance(schema.get("properties"), dict):
        schema["properties"] = {name: move(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = move(schema["items"])
    return {**schema, "$defs": moved} if moved else schema


def _types_of(rng: Random, known: Any) -> Any:
    kinds = [
        kind
        for kind in ("string", "integer", "number", "boolean", "null", "array", "object")
        if is_valid({"type": kind}, known)
    ]
    one = rng.choice(kinds)
    return rng.choice((one, one, [rng.choice(("string", "null", "array")), one]))


def _combined(rng: Random, known: Any, depth: int) -> dict[str, Any]:
    own = around(rng, known, depth - 1)
    others = [arbitrary(rng, 1) for _ in range(rng.randint(1, 2))]
    keyword = rng.choice(("allOf", "anyOf", "oneOf"))
    if keyword == "allOf":
        return {"allOf": [own, around(rng, known, depth - 1)]}
    if keyword == "oneOf":
        others = [other for other in others if not is_valid(other, known)]
    return {keyword: rng.sample([own, *others], 1 + len(others))}


def _around_kind(rng: Random, known: Any, depth: int) -> list[dict[str, Any]]:
    if isinstance(known, str):
        return _around_text(rng, known)
    if isinstance(known, bool) or known is None:
        return []
    if isinstance(known, int | float):
        return [
            {"minimum": known - rng.choice((0, 0.5, 3))},
            {"maximum": known + rng.choice((0, 0.25, 10))},
            {"exclusiveMinimum": known - rng.choice((0.001, 1))},
            {"exclusiveMaximum": known + rng.choice((0.001, 1))},
            {"multipleOf": rng.choice(DIVISORS)},
            {"multipleOf": abs(known) or 1},
        ]
    if isinstance(known, list):
        parts = [around(rng, item, depth - 1) for item in known]
        first = rng.randint(0, len(known))
        rest = {"anyOf": parts[first:]} if parts[first:] else rng.choice((False, {"type": "string"}))
        return [
            {"minItems": max(len(known) - rng.randint(0, 2), 0)},
            {"maxItems": len(known) + rng.randint(0, 2)},
            {"uniqueItems": True},
            {"items": {"anyOf": parts} if parts else False},
            {"prefixItems": parts[:first], "items": rest} if first else {},
        ]
    parts_of = {name: around(rng, part, depth - 1) for name, part in known.items()}
    shown = {name: part for name, part in parts_of.items() if rng.random() < 0.8}
    return [
        {"minProperties": max(len(known) - rng.randint(0, 2), 0)},
        {"maxProperties": len(known) + rng.randint(0, 2)},
        {"required": [name for name in known if rng.random() < 0.7]},
        {"properties": {**shown, **({"zz": arbitrary(rng, 1)} if rng.random() < 0.5 else {})}},
        {"properties": parts_of, "additionalProperties": rng.choice((False, {"type": "null"}))},
    ]


def _around_text(rng: Random, known: str) -> list[dict[str, Any]]:
    spelled = "".join(rng.choice((re.escape(one), ".", f"[{re.escape(one)}q]")) for one in known)
    half = re.escape(known[: len(known) // 2])
    return [
        {"minLength": max(len(known) - rng.randint(0, 3), 0)},
        {"maxLength": len(known) + rng.randint(0, 3)},
        {
            "pattern": rng.choice(
                (f"^{spelled}$", f"^{half}", spelled, f"^(?:{spelled}|no)$", rf"^{half}[\s\S]*$")
            )
        },
        {"pattern": rng.choice(PATTERNS[:-3])},
        *({"format": name} for name, texts in FORMATTED.items() if known in texts),
    ]
