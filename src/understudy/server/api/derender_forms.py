"""What is read as text: answers of `/inference/v1/generate`, requests that carry them, and the state of a stream."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from understudy.server.api.errors import Problem, invalid_body
from understudy.server.api.generation import new_id

CONTEXT_TOKENS = 4

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Ids = list[_Count]
_Form = TypeVar("_Form")


class Top(msgspec.Struct):
    """A token that could have come, by number."""

    token_id: _Count
    logprob: float


class Entry(msgspec.Struct):
    """A token that came."""

    token_id: _Count
    logprob: float
    top_logprobs: list[Top] = []


class Logprobs(msgspec.Struct):
    """Of the tokens of a choice."""

    content: list[Entry] | None = None


class Choice(msgspec.Struct):
    """One answer, or what a chunk adds to it."""

    index: int
    token_ids: _Ids | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Usage(msgspec.Struct):
    """What it cost."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Answer(msgspec.Struct):
    """Of `/inference/v1/generate`: all of it, or a chunk."""

    choices: list[Choice]
    request_id: str = msgspec.field(default_factory=new_id)
    usage: Usage | None = None
    prompt_token_ids: _Ids | None = None
    prompt_logprobs: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    output_mode: Literal["tokens"] = "tokens"


class StreamState(msgspec.Struct):
    """What a client carries from chunk to chunk, under vLLM's names."""

    prev_tokens: Annotated[list[str], msgspec.Meta(max_length=1024)] = []
    """The tokens that may still change what the next ones read as."""
    prefix_offset: _Count = 0
    read_offset: _Count = 0
    """Of them, so many have been told."""
    role_sent: bool = False
    logprob_context_token_ids: Annotated[list[int], msgspec.Meta(max_length=CONTEXT_TOKENS)] = []
    logprob_text_offset: _Count = 0
    output_token_ids: list[int] = []
    output_chunk_lens: list[Annotated[int, msgspec.Meta(gt=0)]] = []
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = []


class Whole(msgspec.Struct):
    """Of `/v1/completions/derender`: an answer for each prompt."""

    generate_responses: list[Answer]
    model: str | None = None
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[_Ids | None] | None = None
    completion_request: dict[str, Any] | None = None


class WholeChat(msgspec.Struct):
    """Of `/v1/chat/completions/derender`."""

    generate_response: Answer
    model: str | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: _Ids | None = None
    chat_request: dict[str, Any] | None = None


class Part(msgspec.Struct):
    """Of both, for a stream: one chunk."""

    generate_chunk: Answer
    model: str | None = None
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: _Ids | None = None
    completion_request: dict[str, Any] | None = None
    chat_request: dict[str, Any] | None = None


def streams(body: dict[str, Any], where: str) -> bool:
    """Whether it is a chunk of a stream. ApiError for anything but true and false."""
    given = body.get("stream", False)
    if not isinstance(given, bool | int) or given not in (0, 1):
        raise invalid_body([Problem("literal_error", f"{where}.stream", "must be true or false", given)])
    return bool(given)


def read_form(body: dict[str, Any], form: type[_Form], where: str) -> _Form:
    """ApiError in vLLM's order: of a chunk that is none, the first complaint is that it is no whole answer."""
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
