"""Error answers in the forms of trtllm-serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCHEMA = "Bad Request"
"""Kind of errors that vLLM's schema finds."""
_KINDS: Mapping[str, str] = {"Bad Request": "BadRequestError", "Service Unavailable": "ServiceUnavailable"}


def error_bytes(error: ApiError, path: str) -> bytes:  # noqa: ARG001
    """Return the answer's JSON: flat fields, or the text alone for a body that violates the schema."""
    if type(error) is not ApiError or error.detail:
        return error.body()
    if error.kind == _SCHEMA and error.status == 400:
        return msgspec.json.encode({"error": str(error)})
    kind = _KINDS.get(error.kind, error.kind)
    fields = {"object": "error", "message": str(error), "type": kind, "param": None, "code": error.status}
    return msgspec.json.encode(fields)


def stream_error(error: ApiError) -> bytes:
    """Return the event of a stream that ends with an error."""
    fields = {"message": str(error), "type": "server_error", "code": None, "param": None}
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"
