"""Bodies of the derender routes: answers of `/inference/v1/generate`, requests with them, stream state."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from understudy.server.api.errors import Problem, invalid_body
from understudy.server.api.ids import new_id

CONTEXT_TOKENS = 4

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ids = list[_Count]
_Form = TypeVar("_Form")


class Top(msgspec.Struct):
    """An alternative token, by id."""

    token_id: _Count
    logprob: float


class Entry(msgspec.Struct):
    """A generated token, by id."""

    token_id: _Count
    logprob: float
    top_logprobs: list[Top] = []


class Logprobs(msgspec.Struct):
    """Logprobs of the tokens of a choice."""

    content: list[Entry] | None = None


class Choice(msgspec.Struct):
    """One answer, or a chunk of it."""

    index: int
    token_ids: _Ids | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Answer(msgspec.Struct):
    """An answer of `/inference/v1/generate`, or a chunk of it."""

    choices: list[Choice]
    request_id: str = msgspec.field(default_factory=new_id)
    usage: Usage | None = None
    prompt_token_ids: _Ids | None = None
    prompt_logprobs: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    output_mode: Literal["tokens"] = "tokens"


class StreamState(msgspec.Struct):
    """Stream state that a client sends back with each chunk, under vLLM's names."""

    prev_tokens: Annotated[list[str], msgspec.Meta(max_length=1024)] = []
    """Tokens that may still change how the next ones decode."""
    prefix_offset: _Count = 0
    read_offset: _Count = 0
    """Number of `prev_tokens` whose text was returned."""
    role_sent: bool = False
    logprob_context_token_ids: Annotated[list[int], msgspec.Meta(max_length=CONTEXT_TOKENS)] = []
    logprob_text_offset: _Count = 0
    output_token_ids: list[int] = []
    output_chunk_lens: list[Annotated[int, msgspec.Meta(gt=0)]] = []
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = []


class Whole(msgspec.Struct):
    """Body of `/v1/completions/derender`: an answer per prompt."""

    generate_responses: list[Answer]
    model: str | None = None
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[_Ids | None] | None = None
    completion_request: dict[str, Any] | None = None


class WholeChat(msgspec.Struct):
    """Body of `/v1/chat/completions/derender`."""

    generate_response: Answer
    model: str | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: _Ids | None = None
    chat_request: dict[str, Any] | None = None


class Part(msgspec.Struct):
    """Body of both routes for a stream: one chunk."""

    generate_chunk: Answer
    model: str | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: _Ids | None = None
    completion_request: dict[str, Any] | None = None
    chat_request: dict[str, Any] | None = None


def streams(body: dict[str, Any], where: str) -> bool:
    """Return True for a chunk of a stream. ApiError when `stream` is not a boolean."""
    given = body.get("stream", False)
    if not isinstance(given, bool | int) or given not in (0, 1):
        raise invalid_body([Problem("literal_error", f"{where}.stream", "must be true or false", given)])
    return bool(given)


def read_form(body: dict[str, Any], form: type[_Form], where: str) -> _Form:
    """Read a body. ApiError in vLLM's order: for an invalid chunk, the first problem is `stream`."""
    try:
        read = msgspec.convert(body, form, strict=False)
        state = getattr(read, "stream_state", None)
        if state is None or sum(state.output_chunk_lens) == len(state.output_token_ids):
            return read
        problem = Problem(
            "value_error", f"{where}.stream_state", "output_chunk_lens and output_token_ids differ"
        )
    except msgspec.ValidationError as error:
        text = str(error)
        path = re.search(r"at `\$\.?([^`]*)`", text)
        missing = re.search(r"missing required field `([^`]*)`", text)
        parts = [path[1] if path else "", missing[1] if missing else ""]
        name = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", ".".join(part for part in parts if part))
        problem = Problem("missing" if missing else "type_error", f"{where}.{name}".rstrip("."), text)
    if form is Part:
        raise invalid_body([Problem("literal_error", f"{where}.stream", "must be false", True), problem])
    raise invalid_body([problem])
