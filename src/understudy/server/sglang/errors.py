"""Error answers in SGLang's forms."""

from __future__ import annotations

import msgspec

from understudy.server.api.errors import ApiError

_KINDS = {"BadRequestError": "BadRequest"}
"""SGLang's names of vLLM's error types."""
GENERATE = "/generate"


class ContractError(ApiError):
    """A field of `/generate` with a wrong type or an unknown name."""

    def body(self) -> bytes:
        """Return the answer's JSON."""
        return msgspec.json.encode({"error": str(self)})


def flat_error(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """Build a body in SGLang's form, whose fields are not nested."""
    fields = {"object": "error", "message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode(fields)


def is_value_error(error: ApiError) -> bool:
    """Return True for an error that SGLang finds after the body's schema; a stream reports it as an event."""
    return type(error) is ApiError and error.kind == "BadRequestError"


def error_bytes(error: ApiError, path: str) -> bytes:
    """Return the answer's JSON for an error of a route."""
    if type(error) is not ApiError or error.detail or error.anthropic:
        return error.body()
    if path == GENERATE and is_value_error(error):
        return msgspec.json.encode({"error": {"message": str(error)}})
    return flat_error(error.status, str(error), _KINDS.get(error.kind, error.kind))


def error_event(error: ApiError) -> bytes:
    """Return the events of a stream of `/generate` that ends with an error."""
    fields = {
        "message": str(error),
        "type": "invalid_request_error",
        "code": error.status,
        "retryable": False,
    }
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\ndata: [DONE]\n\n"
