"""Random JSON schemas of what the library supports, which at least one value satisfies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

NAMES = ("name", "age", "tags", "address", "é", "p q", "kind", "$ref-like", 'quo"te')
PATTERNS = (
    "^[a-z]+$",
    "[0-9]{2,3}",
    "^(foo|bar)*$",
    "a.c",
    "^.{2,6}$",
    r"^\d{3}-\w+$",
    "foo",
    "^(?:a{1,3}b){2}$",
    r"^\S+@\S+$",
)
FORMATS = ("date-time", "date", "time", "email", "uuid", "uri", "ipv4", "ipv6")


def draw_schema(rng: Random, depth: int = 4) -> dict[str, Any]:
    kinds = ["string", "string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth > 0:
        kinds += ["array", "object", "object", "anyOf", "allOf", "nullable"] + ["object"] * 2 * (depth == 4)
    drawn: dict[str, Any] = KINDS[rng.choice(kinds)](rng, depth - 1)
    return drawn


def draw_document(rng: Random) -> dict[str, Any]:
    """Return a schema with definitions, one of which refers to itself."""
    node = {
        "type": "object",
        "properties": {
            "value": draw_schema(rng, 1),
            "next": rng.choice(
                ({"$ref": "#/$defs/node"}, {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
            ),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "required": rng.choice((["value"], ["value", "children"])),
    }
    return {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}, "other": draw_schema(rng, 3)},
        "$defs": {"node": node},
        **rng.choice(({}, {"required": ["tree"]}, {"additionalProperties": False})),
    }


def _string(rng: Random, _: int) -> dict[str, Any]:
    least = rng.choice((0, 3, 12, 40))
    return {
        "type": "string",
        **rng.choice(
            (
                {},
                {"minLength": least},
                {"minLength": least, "maxLength": least + rng.randint(0, 5)},
                {"pattern": rng.choice(PATTERNS)},
                {"format": rng.choice(FORMATS)},
            )
        ),
    }


def _number(kind: str, rng: Random) -> dict[str, Any]:
    least = rng.randint(-1000, 1000) if kind == "integer" else round(rng.uniform(-50, 50), 2)
    return {
        "type": kind,
        **rng.choice(
            (
                {},
                {"minimum": least},
                {"maximum": least},
                {"minimum": least, "maximum": least + rng.choice((0, 1, 100))},
                {"exclusiveMinimum": least, "exclusiveMaximum": least + 12},
                {"minimum": least, "maximum": least + 100, "multipleOf": rng.choice((2, 5, 7, 50))},
                {"multipleOf": rng.choice((3, 10))},
            )
        ),
    }


def _array(rng: Random, depth: int) -> dict[str, Any]:
    least = rng.choice((0, 0, 1, 2, 5))
    more: dict[str, Any] = {"minItems": least} if rng.random() < 0.5 else {}
    if rng.random() < 0.4:
        more |= {"maxItems": least + rng.randint(0, 3)}
    if rng.random() < 0.2:
        more |= {"prefixItems": [draw_schema(rng, depth) for _ in range(2)]}
    return {"type": "array", "items": draw_schema(rng, depth), **more}


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.4:
        schema["additionalProperties"] = rng.choice((False, True, draw_schema(rng, 0)))
    elif rng.random() < 0.1:
        schema = {
            "type": "object",
            "additionalProperties": draw_schema(rng, 0),
            "minProperties": rng.randint(1, 3),
        }
    return schema


def _all_of(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, 2)
    parts = [{"properties": {name: draw_schema(rng, depth)}, "required": [name]} for name in names]
    return {"type": "object", "allOf": parts}


KINDS: dict[str, Any] = {
    "string": _string,
    "integer": lambda rng, _: _number("integer", rng),
    "number": lambda rng, _: _number("number", rng),
    "boolean": lambda _rng, _: {"type": "boolean"},
    "null": lambda _rng, _: {"type": "null"},
    "enum": lambda rng, _: {
        "enum": rng.sample(["red", "green", 3, 3.5, None, True, ["x"], {"a": 1}, "é<|end|>"], 3)
    },
    "const": lambda rng, _: {"const": rng.choice(("fixed", 12, {"a": [1, "x"]}, "</s>"))},
    "array": _array,
    "object": _object,
    "anyOf": lambda rng, depth: {"anyOf": [draw_schema(rng, depth) for _ in range(rng.randint(1, 3))]},
    "allOf": _all_of,
    "nullable": lambda rng, depth: {"anyOf": [draw_schema(rng, depth), {"type": "null"}]},
}
