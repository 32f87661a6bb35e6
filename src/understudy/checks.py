"""Settings and numbers from users: wrong ones are refused in one sentence that names them and says what is right."""

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
    "object": "settings by name",
    "array": "a list",
    "null": "null",
}


def whole_number(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """`value` as an int (numpy's are taken too) from `least` to `most`, else ConfigError."""
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
    """The JSON object that a file holds, else ConfigError names it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{what}{path}: expected settings by name at the top level")
    return content


def port_number(name: str, value: Any, count: int = 1) -> int:
    """`value` as a port (0: any free one) from which `count` ports can be numbered, else ConfigError."""
    port = whole_number(name, value, 0, 65535)
    if count > 65535:
        raise ConfigError(f"{name}: there are 65,535 ports, too few for {count:,} in a row")
    if port and port + count - 1 > 65535:
        raise ConfigError(
            f"{name} must be at most {65536 - count:,} for {count:,} ports in a row, got {port:,}"
        )
    return port


def plain_number(name: str, value: Any) -> float:
    """`value` as Python's own int or float, with which a report can be written; else ConfigError."""
    if type(value) is int or type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return float(value)


def positive_number(name: str, value: Any, *, or_zero: bool = False) -> float:
    """`value` as `plain_number` if it is finite and above 0 (or 0 too), else ConfigError."""
    number = plain_number(name, value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
        raise ConfigError(
            f"{name} must be a finite number {'from' if or_zero else 'above'} 0, got {number:g}"
        )
    return number


def read_as(kind: type[_T], settings: Any, where: str = "") -> _T:
    """Settings by name as a struct of `kind`; `where` stands in front of their names.

    ConfigError names the setting at fault, with the choices that it has or what it must be.
    """
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_in_words(error, kind, settings, where)) from error


def _in_words(error: msgspec.ValidationError, kind: type, settings: Any, where: str) -> str:
    text = str(error)
    found = _PATH.search(text)
    path = found[1] if found else ""
    reason = text[: found.start()] if found else text
    if isinstance(error.__cause__, ConfigError):
        return reason  # of our own: it names the setting
    name = f"{where}{path}" if where else path.lstrip(".")
    value = _at(settings, path)
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


def _steps(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _at(settings: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            settings = settings[int(step)] if isinstance(settings, list | tuple) else settings[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return settings
    return settings


def _types(info: inspect.Type, path: str) -> list[inspect.Type]:
    """What may stand at `path`; several where a union forks."""
    here = [info]
    for step in _steps(path):
        here = [inner for outer in here for one in _members(outer) for inner in _inside(one, step)]
    return [one for outer in here for one in _members(outer)]


def _members(info: inspect.Type) -> list[inspect.Type]:
    if isinstance(info, inspect.UnionType):
        return list(info.types)
    return [info]


def _inside(info: inspect.Type, step: str) -> list[inspect.Type]:
    if isinstance(info, inspect.StructType):
        if step == info.tag_field:
            return [inspect.LiteralType((str(info.tag),))]
        return [field.type for field in info.fields if field.encode_name == step]
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
    """What `value` may hold there: of its own kind, where it names one."""
    structs = [one for one in _types(info, path) if isinstance(one, inspect.StructType)]
    own = [one for one in structs if isinstance(value, dict) and value.get(str(one.tag_field)) == one.tag]
    return [field.encode_name for one in own or structs for field in one.fields]
