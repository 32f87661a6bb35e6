"""Error answers in vLLM's form."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from understudy.http import Connection

log = logging.getLogger("understudy.server")


class ApiError(Exception):
    """An error answer. `param` names the invalid field."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.detail = False
        """True for the error form of FastAPI."""
        self.anthropic = False
        """True for Anthropic's form: only kind and message."""

    def body(self) -> bytes:
        """Return the answer's JSON."""
        if self.detail:
            return msgspec.json.encode({"detail": str(self)})
        if self.anthropic:
            return msgspec.json.encode({"type": "error", "error": {"type": self.kind, "message": str(self)}})
        return error_body(self.status, str(self), self.kind, self.param)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """Build a body in OpenAI's form, with the status as code."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


PAUSED = "Generation is paused. Please retry after it resumes."
SHUTTING_DOWN = error_body(503, "the server is shutting down", "Service Unavailable")
"""The body for requests that a server does not answer in full because it stops."""


def answer_error(error: Exception, connection: Connection) -> None:
    """Send an error to the client; log an unhandled exception."""
    connection.on_close = None
    if not isinstance(error, ApiError):
        log.error("unhandled exception in a request", exc_info=error)
        error = ApiError("an error inside the server", status=500, kind="InternalServerError")
    connection.respond(error.status, form_of(error, connection))


def form_of(error: ApiError, connection: Connection) -> bytes:
    """Return the JSON of an error in the form of the server that answers on the connection."""
    return error.body() if connection.error_form is None else connection.error_form(error)


def bad_value(message: str, param: str, value: object = msgspec.UNSET) -> ApiError:
    """Build the error for an invalid value: the message ends with the parameter."""
    given = f"parameter={param}" if value is msgspec.UNSET else f"parameter={param}, value={value}"
    return ApiError(f"{message} ({given})", param=param)


def bad_request(message: str) -> ApiError:
    """Build the error of vLLM's smaller routes for an unusable body, without param."""
    return ApiError(message, kind="Bad Request")


def no_such_model(name: str, names: tuple[str, ...]) -> ApiError:
    """Build the error for a model that is not served here."""
    known = ", ".join(names)
    return ApiError(
        f"The model `{name}` does not exist. Valid aliases: {known}.",
        status=404,
        kind="NotFoundError",
        param="model",
    )


class Problem(msgspec.Struct, frozen=True):
    """One schema violation of a body."""

    kind: str
    where: str
    message: str
    given: object = None

    def __str__(self) -> str:
        shown, usual = str(self.given)[:200], _USUAL.get(self.kind)
        message = self.message if usual is None else f"{usual}: {self.message}"
        return str({"type": self.kind, "loc": self.where, "msg": message, "input": shown})


_USUAL = {
    "missing": "Field required",
    "string_type": "Input should be a valid string",
    "list_type": "Input should be a valid list",
    "dict_type": "Input should be a valid dictionary",
    "int_type": "Input should be a valid integer",
    "int_parsing": "Input should be a valid integer, unable to parse string as an integer",
    "int_from_float": "Input should be a valid integer, got a number with a fractional part",
    "float_type": "Input should be a valid number",
    "float_parsing": "Input should be a valid number, unable to parse string as a number",
    "bool_type": "Input should be a valid boolean",
    "bool_parsing": "Input should be a valid boolean, unable to interpret input",
}
"""Phrases that clients match, by kind; they precede the message of a problem."""


def invalid_body(problems: list[Problem], *, param: bool = True) -> ApiError:
    """Build the 400 for a body that violates the schema."""
    count = len(problems)
    lines = "\n".join(f"  {problem}" for problem in problems[:10])
    return ApiError(
        f"{count} validation error{'s' if count > 1 else ''}:\n{lines}",
        kind="Bad Request",
        param=problems[0].where if param else None,
    )
