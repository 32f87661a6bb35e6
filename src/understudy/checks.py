"""Check settings and numbers from users; a ConfigError names the field and the valid values."""

from __future__ import annotations

import json
import math
import operator
import re
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import inspect

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")

_PATH = re.compile(r" - at `\$(.*?)`$")
_EXPECTED = re.compile(r"Expected `(.*?)`(?:, got `(.*?)`)?$")
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "object": "a mapping",
    "array": "a list",
    "null": "null",
}


def whole_number(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Return `value` as an int (numpy integers too) from `least` to `most`, else raise ConfigError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
    if number < least or (most is not None and number > most):
        wanted = f"at least {least:,}" if most is None or number < least else f"at most {most:,}"
        raise ConfigError(f"{name} must be {wanted}, got {number:,}")
    return number


def read_settings(path: Path, what: str = "") -> dict[str, Any]:
    """Read the JSON object in a file. ConfigError names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{what}{path}: must be a JSON object at the top level")
    return content


def port_number(name: str, value: Any, count: int = 1) -> int:
    """Return `value` as the first of `count` consecutive ports (0: any free ones), else raise ConfigError."""
    port = whole_number(name, value, 0, 65535)
    if count > 65535:
        raise ConfigError(f"{name}: {count:,} consecutive ports are needed, and there are 65,535")
    if port and port + count - 1 > 65535:
        raise ConfigError(
            f"{name} must be at most {65536 - count:,} for {count:,} consecutive ports, got {port:,}"
        )
    return port


def plain_number(name: str, value: Any) -> float:
    """Return `value` as a Python int or float, which a report can serialise; else raise ConfigError."""
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return float(value)


def positive_number(name: str, value: Any, *, or_zero: bool = False, remedy: str = "") -> float:
    """Return `value` as a finite number above 0 (or from 0), else raise ConfigError; `remedy` ends its message."""
    number = plain_number(name, value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
        raise ConfigError(
            f"{name} must be a finite number {'from' if or_zero else 'above'} 0, got {number:g}"
            f"{f'; {remedy}' if remedy else ''}"
        )
    return number


def share(name: str, value: Any, *, or_zero: bool = False, or_one: bool = True, remedy: str = "") -> float:
    """Return `value` as a share above 0 (or from 0) and at most 1 (or below 1), else raise ConfigError."""
    number = plain_number(name, value)
    if (number >= 0 if or_zero else number > 0) and (number <= 1 if or_one else number < 1):
        return number
    wanted = f"{'from' if or_zero else 'above'} 0 and {'at most' if or_one else 'below'} 1"
    percent = number if 1 < number < 100 or (or_one and number == 100) else 5.0
    remedy = remedy or f"for {percent:g} % write {percent / 100:g}"
    raise ConfigError(f"{name} must be a share {wanted}, got {number:g}; {remedy}")


def switch(name: str, value: Any) -> bool:
    """Return `value` if it is True or False, else raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return value


def check_model(model: object) -> None:
    """Raise ConfigError if `model` is neither text nor None."""
    if not isinstance(model, str | None):
        raise ConfigError(f"model must be the name of a model or the path of its config.json, got {model!r}")


def read_as(kind: type[_T], settings: Any, where: str = "") -> _T:
    """Convert a mapping of settings to a struct of `kind`; `where` prefixes their names in messages.

    ConfigError names the invalid setting and its valid values or type.
    """
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe(error, kind, settings, where)) from error


def _describe(error: msgspec.ValidationError, kind: type, settings: Any, where: str) -> str:
    text = str(error)
    found = _PATH.search(text)
    path = found[1] if found else ""
    reason = text[: found.start()] if found else text
    if isinstance(error.__cause__, ConfigError):
        # A ConfigError of a struct's own check already names the setting, but not which entry of a list it is.
        listed = re.fullmatch(r"\.?(\w+)(\[\d+\])", path)
        start = "" if listed is None else f"{listed[1]}: "
        return (
            f"{listed[1]}{listed[2]}.{reason[len(start) :]}"
            if listed and reason.startswith(start)
            else reason
        )
    name = f"{where}{path}" if where else path.lstrip(".")
    value = _value_at(settings, path)
    if choices := _choices(inspect.type_info(kind), path):
        return f"{name} must be one of {', '.join(choices)}; got {value!r}"
    if unknown := re.match(r"Object contains unknown field `(.*?)`", reason):
        fields = _fields(inspect.type_info(kind), path, value)
        return f"{f'{name}.' if name else ''}{unknown[1]} is not known; known are {', '.join(fields)}"
    if missing := re.match(r"Object missing required field `(.*?)`", reason):
        return f"{f'{name}.' if name else ''}{missing[1]} is missing"
    if wanted := _EXPECTED.match(reason):
        kinds = [_KINDS.get(one, one) for one in wanted[1].split(" | ")]
        return f"{name or 'the settings'} must be {' or '.join(kinds)}, got {value!r}"
    return f"{name}: {reason}" if name else reason


def _split_path(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _value_at(settings: Any, path: str) -> Any:
    for key in _split_path(path):
        try:
            settings = settings[int(key)] if isinstance(settings, list | tuple) else settings[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return settings
    return settings


def _types(info: inspect.Type, path: str) -> list[inspect.Type]:
    """List the types that are valid at `path`; a union has several."""
    types = [info]
    for key in _split_path(path):
        types = [inner for outer in types for one in _members(outer) for inner in _types_at_key(one, key)]
    return [one for outer in types for one in _members(outer)]


def _members(info: inspect.Type) -> list[inspect.Type]:
    if isinstance(info, inspect.UnionType):
        return list(info.types)
    return [info]


def _types_at_key(info: inspect.Type, key: str) -> list[inspect.Type]:
    if isinstance(info, inspect.StructType):
        if key == info.tag_field:
            return [inspect.LiteralType((str(info.tag),))]
        return [field.type for field in info.fields if field.encode_name == key]
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return [info.item_type]
    return []


def _choices(info: inspect.Type, path: str) -> list[str]:
    literals = [one for one in _types(info, path) if isinstance(one, inspect.LiteralType)]
    others = [
        one for one in _types(info, path) if not isinstance(one, inspect.LiteralType | inspect.NoneType)
    ]
    return [] if others else [str(value) for one in literals for value in one.values]


def _fields(info: inspect.Type, path: str, value: Any) -> list[str]:
    """List the field names that are valid at `path`; only those of its own kind if `value` names one."""
    structs = [one for one in _types(info, path) if isinstance(one, inspect.StructType)]
    own = [one for one in structs if isinstance(value, dict) and value.get(str(one.tag_field)) == one.tag]
    return [field.encode_name for one in own or structs for field in one.fields]
