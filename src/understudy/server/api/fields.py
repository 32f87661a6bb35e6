"""Reads fields of a body with the conversions of vLLM's schema: "5" is an int, 1 is true, a number is no string."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from understudy.server.api.errors import ApiError, Problem, bad_request, invalid_body

if TYPE_CHECKING:
    from understudy.http import Request

_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))
_MAX_DIGITS = 4300
_NUMBER = re.compile(r"-?[0-9]+")
_HALF_CHARACTER = "must be text; half of a surrogate pair is no character"


def read_body(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request. ApiError with vLLM's param otherwise."""
    check_content_type(request)
    body = read_json(request) if request.body else None
    if not isinstance(body, dict):
        raise invalid_body([Problem("model_attributes_type", "body", "the body must be an object", body)])
    return body


def check_content_type(request: Request) -> None:
    """Raise vLLM's ApiError when the content type is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid_body(
            [Problem("content_type", "header.content-type", "the body must be application/json", kind)],
            param=False,
        )


def read_object(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request to a route that ignores the content type."""
    body = read_any(request)
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def read_any(request: Request) -> Any:
    """Read any JSON of a request to a route that ignores the content type."""
    decoded = request.decode()
    if decoded.error:
        raise bad_request(f"body: {decoded.error[:200]}")
    if decoded.half_character is not None:
        raise bad_request(f"{decoded.half_character}: {_HALF_CHARACTER}")
    return decoded.value


def read_json(request: Request) -> Any:
    """Decode the body of a request. vLLM's ApiError when it is invalid JSON or nested too deeply."""
    decoded = request.decode()
    if not decoded.is_utf8:
        error = ApiError("the body is not UTF-8")
        error.detail = True
        raise error
    if decoded.error:
        raise invalid_body([Problem("json_invalid", f"body.{decoded.place}", decoded.error, {})])
    if decoded.half_character is not None:
        raise invalid_body([Problem("string_unicode", decoded.half_character, _HALF_CHARACTER)])
    return decoded.value


def whole_number(text: str, most_digits: int = 18) -> int | None:
    """Parse a whole number in ASCII digits (`int` and `isdigit` accept others too); None if invalid."""
    if not _NUMBER.fullmatch(text) or len(text.removeprefix("-")) > most_digits:
        return None
    return int(text)


class Fields:
    """Reads the fields of one object; collects wrong types, and `done` raises them together."""

    def __init__(self, values: dict[str, Any], where: str = "body") -> None:
        self._values = values
        self._where = where
        self.problems: list[Problem] = []

    def done(self) -> None:
        """Raise ApiError if there were problems."""
        if self.problems:
            raise invalid_body(self.problems)

    def raw(self, name: str) -> Any:
        """Return the unconverted value; None if missing."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Return True if the field is present, also as null."""
        return name in self._values

    def note(self, kind: str, name: str, message: str, given: object = None) -> None:
        """Record a problem of a field."""
        self.problems.append(Problem(kind, f"{self._where}.{name}", message, given))

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Read a whole number, also from text, float or bool."""
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
        """Read a number, also from text or bool."""
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
        """Read a boolean, also from 0, 1 or a word for it."""
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
        """Read a string."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.note("string_type", name, "must be a string", value)
        return default

    def texts(self, name: str) -> list[str]:
        """Read a string or a list of strings."""
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
        """Read a list of whole numbers."""
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
        """Read an object."""
        value = self._values.get(name)
        if value is None or isinstance(value, dict):
            return value
        self.note("model_type", name, "must be an object", value)
        return None
