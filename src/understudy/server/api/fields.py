"""Reads the fields of a body as leniently as vLLM's schema does: "5" is an int, 1 is true, a string only a string."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.errors import ApiError, Problem, bad_request, invalid_body

if TYPE_CHECKING:
    from understudy.server.http import Request

_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))
_MAX_DIGITS = 4300
_NUMBER = re.compile(r"-?[0-9]+")
_HALF_CHARACTER = "must be text; half of a surrogate pair is no character"


def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. ApiError with vLLM's param otherwise."""
    check_content_type(request)
    body = read_json(request.body) if request.body else None
    if not isinstance(body, dict):
        raise invalid_body([Problem("model_attributes_type", "body", "the body must be an object", body)])
    return body


def check_content_type(request: Request) -> None:
    """It must be JSON's. ApiError as vLLM's otherwise."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid_body(
            [Problem("content_type", "header.content-type", "the body must be application/json", kind)],
            param=False,
        )


def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request to a route that looks at nothing else, its type of content included."""
    body = read_any(request)
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def read_any(request: Request) -> Any:
    """The JSON of a request to such a route."""
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None
    where = _half_character(value)
    if where is not None:
        raise bad_request(f"{where}: {_HALF_CHARACTER}")
    return value


def read_json(data: bytes) -> Any:
    """Any JSON value."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise invalid_body([Problem("json_invalid", "body.0", "the JSON is nested too deeply")]) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        _check_encoding(data)
    # The slower reader knows where it failed, and reads NaN, and halves of surrogate pairs.
    try:
        value = json.loads(data)
    except RecursionError:
        raise invalid_body([Problem("json_invalid", "body.0", "the JSON is nested too deeply")]) from None
    except json.JSONDecodeError as error:
        raise invalid_body(
            [Problem("json_invalid", f"body.{error.pos}", f"not JSON: {error.msg}", {})]
        ) from None
    except ValueError as error:  # not UTF-8, or a number of absurd length
        raise invalid_body([Problem("json_invalid", "body.0", f"not JSON: {error}", {})]) from None
    where = _half_character(value)
    if where is not None:
        raise invalid_body([Problem("string_unicode", where, _HALF_CHARACTER)])
    return value


def _half_character(value: Any) -> str | None:
    """Where a text has half of a surrogate pair: it is no character, and cannot be sent to anybody."""
    left: list[tuple[str, Any]] = [("body", value)]
    while left:
        where, part = left.pop()
        if isinstance(part, str):
            if not _encodes(part):
                return where
        elif isinstance(part, list):
            left.extend((f"{where}.{place}", member) for place, member in enumerate(part))
        elif isinstance(part, dict):
            if not all(map(_encodes, part)):
                return where
            left.extend((f"{where}.{name}", member) for name, member in part.items())
    return None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_encoding(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        error = ApiError("the body is not UTF-8")
        error.detail = True
        raise error from None


def whole_number(text: str, most_digits: int = 18) -> int | None:
    """Of a header, a path or a key, in ASCII's digits (`int` and `isdigit` take others too); None if it is none."""
    if not _NUMBER.fullmatch(text) or len(text.removeprefix("-")) > most_digits:
        return None
    return int(text)


class Fields:
    """The fields of one object; every wrong type is noted, and `done` raises them together."""

    def __init__(self, values: dict[str, Any], where: str = "body") -> None:
        self._values = values
        self._where = where
        self.problems: list[Problem] = []

    def done(self) -> None:
        """ApiError if anything was wrong."""
        if self.problems:
            raise invalid_body(self.problems)

    def raw(self, name: str) -> Any:
        """As it came; None if it did not."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it was given, null included."""
        return name in self._values

    def note(self, kind: str, name: str, message: str, given: object = None) -> None:
        """Something about a field is wrong."""
        self.problems.append(Problem(kind, f"{self._where}.{name}", message, given))

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number, also as text, float or bool."""
        value = self._values.get(name)
        return default if value is None else self._integer(name, value, default)

    def _integer(self, name: str, value: Any, default: int | None) -> int | None:
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, int):
            return value
        if isinstance(value, float):
            if math.isfinite(value) and value.is_integer():
                return int(value)
            self.note("int_from_float", name, "must be a whole number", value)
            return default
        if isinstance(value, str) and len(value) < _MAX_DIGITS:
            try:
                return int(value.strip())
            except ValueError:
                self.note("int_parsing", name, "must be a whole number; this text is none", value)
                return default
        self.note("int_type", name, "must be a whole number", value)
        return default

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number, also as text or bool."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool | int | float):
            try:
                return float(value)
            except OverflowError:
                return math.inf
        if isinstance(value, str):
            try:
                return float(value.strip())
            except ValueError:
                self.note("float_parsing", name, "must be a number; this text is none", value)
                return default
        self.note("float_type", name, "must be a number", value)
        return default

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false, also as 0, 1 or a word for it."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        self.note(
            "bool_parsing" if isinstance(value, str) else "bool_type", name, "must be true or false", value
        )
        return default

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string and nothing else."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.note("string_type", name, "must be a string", value)
        return default

    def texts(self, name: str) -> list[str]:
        """A string or a list of them."""
        value = self._values.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            self.note("list_type", name, "must be a string or a list of strings", value)
            return []
        for place, member in enumerate(value):
            if not isinstance(member, str):
                self.note("string_type", f"{name}.{place}", "must be a string", member)
        return [member for member in value if isinstance(member, str)]

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.note("list_type", name, "must be a list", value)
            return []
        if set(map(type, value)) <= {int}:  # there may be a million of them
            return list(value)
        read = [self._integer(f"{name}.{place}", member, None) for place, member in enumerate(value)]
        return [number for number in read if number is not None]

    def object(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value = self._values.get(name)
        if value is None or isinstance(value, dict):
            return value
        self.note("model_type", name, "must be an object", value)
        return None
