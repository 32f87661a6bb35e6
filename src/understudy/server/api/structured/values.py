"""JSON values: when two are equal, what kind one is, and its text."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec

KINDS = ("string", "integer", "object", "array", "boolean", "null", "fraction")
"""Kinds of values. A number without a fractional part is an integer, also when it is written 1.0."""
TYPES = {kind: (kind,) for kind in KINDS if kind != "fraction"} | {"number": ("integer", "fraction")}
"""The kinds of each of JSON Schema's types."""


class TooLong:
    """Mark a value of which only a beginning was made, because it exceeds the longest answer."""


class LongText(str, TooLong):
    """The beginning of a text."""


class LongList(list[Any], TooLong):
    """The beginning of an array; its last item may be incomplete, too."""


class LongObject(dict[str, Any], TooLong):
    """The beginning of an object; its last value may be incomplete, too."""


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return next(kind for of, kind in _KINDS if isinstance(value, of))


_KINDS = (
    (str, "string"),
    (bool, "boolean"),  # before int, of which it is a kind in Python
    (int, "integer"),
    (list, "array"),
    (dict, "object"),
    (object, "null"),
)


def identity(value: Any) -> Any:
    """Return a hashable that is equal for equal JSON values only: 1 equals 1.0, and true equals neither."""
    if isinstance(value, list):
        return (list, tuple(map(identity, value)))
    if isinstance(value, dict):
        return (dict, frozenset((name, identity(part)) for name, part in value.items()))
    return (bool, value) if isinstance(value, bool) else value


def is_multiple(value: float, divisor: float) -> bool:
    """Return whether a number is a multiple of another; as validators do, by the quotient of floats."""
    if isinstance(divisor, int):
        return value % divisor == 0
    try:
        quotient = value / divisor
        return int(quotient) == quotient
    except OverflowError:
        return (Fraction(value) / Fraction(divisor)).denominator == 1


def json_of(value: Any) -> str:
    """Return the JSON text of a value, without its end where only its beginning was made."""
    if not isinstance(value, TooLong):
        return msgspec.json.encode(value).decode()
    if isinstance(value, LongList):
        return "[" + ",".join(map(json_of, value))
    if isinstance(value, LongObject):
        return "{" + ",".join(f"{json_of(name)}:{json_of(part)}" for name, part in value.items())
    return msgspec.json.encode(str(value)).decode()[:-1]
