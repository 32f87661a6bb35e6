"""Answer formats of `/v1/responses` and `/v1/messages`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.anthropic import use_anthropic_form
from understudy.server.api.ids import new_id
from understudy.server.api.texts import json_text

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({**body, "type": name}))


def _anthropic_event(name: str, **body: Any) -> bytes:
    """Format an Anthropic event, with its type first."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **body}))


def _encode_text(choice: Choice, generation: Generation, first: int, count: int) -> bytes:
    if choice.plan.pieces is None:
        plain = generation.worker.texts.plain
        return b"".join(plain[token] for token in choice.plan.tokens[first : first + count])
    return json_text("".join(choice.plan.pieces[first : first + count]))


class ResponsesStyle:
    """Formats OpenAI responses: one message of output text."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._message = f"msg_{new_id()}"
        self._sequence = -1

    def begin(self, generation: Generation) -> None:
        """Do nothing: events have no common part."""

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _begin(self, generation: Generation) -> bytes:
        empty = self._response(generation, "in_progress", None)
        return b"".join(
            _event(f"response.{name}", {"response": empty, "sequence_number": self._next()})
            for name in ("created", "in_progress")
        )

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format text deltas; before the first, also the response, its item and its part."""
        out: list[bytes] = []
        place = {"output_index": 0, "item_id": self._message}
        if first == 0:
            out.append(self._begin(generation))
            item = self._item("", "in_progress")
            item["content"] = []
            out.append(
                _event(
                    "response.output_item.added",
                    {"item": item, "output_index": 0, "sequence_number": self._next()},
                )
            )
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            out.append(
                _event(
                    "response.content_part.added",
                    {"part": part, "content_index": 0, **place, "sequence_number": self._next()},
                )
            )
        text = _encode_text(choice, generation, first, count)
        if text:
            out.append(
                b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","content_index":0,'
                b'"output_index":0,"item_id":"%b","logprobs":[],"sequence_number":%d,"delta":"%b"}\n\n'
                % (self._message.encode(), self._next(), text)
            )
        if last:
            whole = choice.plan.text(generation.worker.texts, choice.emitted)
            base = {"content_index": 0, **place}
            out.append(
                _event(
                    "response.output_text.done",
                    {"text": whole, "logprobs": [], **base, "sequence_number": self._next()},
                )
            )
            ended: dict[str, Any] = {
                "type": "output_text",
                "text": whole,
                "annotations": [],
                "logprobs": None,
            }
            out.append(
                _event("response.content_part.done", {"part": ended, **base, "sequence_number": self._next()})
            )
            item = self._item(whole, self._status(generation, item=True))
            out.append(
                _event(
                    "response.output_item.done",
                    {"item": item, "output_index": 0, "sequence_number": self._next()},
                )
            )
        return b"".join(out)

    def close(self, generation: Generation) -> bytes:
        """Format the completed response."""
        response = msgspec.json.decode(self.whole(generation))
        name = f"response.{self._status(generation, item=True)}"
        return _event(name, {"response": response, "sequence_number": self._next()})

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format the begin of a response that does not go on, as vLLM does."""
        return self._begin(generation)

    def whole(self, generation: Generation) -> bytes:
        """Format the whole response."""
        choice = generation.choices[0]
        text = choice.plan.text(generation.worker.texts, choice.emitted)
        return msgspec.json.encode(self._response(generation, self._status(generation), text))

    def _status(self, generation: Generation, *, item: bool = False) -> str:
        """Return the status of the response or, with `item`, of its message and of the last event."""
        if item and not generation.worker.release.marks_incomplete:
            return "completed"
        return "completed" if generation.choices[0].plan.finish == "stop" else "incomplete"

    def _item(self, text: str, status: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        ]
        return {
            "id": self._message,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _echo(self, name: str) -> Any:
        """Return a field about the prompt cache as the response repeats it."""
        value = self._body.get(name)
        if name == "prompt_cache_options" and value is not None:
            wanted = {"mode": "implicit", "ttl": "30m", "comparison_response_id": None}
            return {key: value.get(key, default) for key, default in wanted.items()}
        return "in_memory" if name == "prompt_cache_retention" and value == "in-memory" else value

    def _response(self, generation: Generation, status: str, text: str | None) -> dict[str, Any]:
        usage = None
        marks = generation.worker.release.marks_incomplete
        times = None if text is None else generation.metrics()
        if text is not None:
            done = generation.completion_tokens
            usage = {
                "input_tokens": generation.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": generation.cached_tokens(last=True),
                    "cache_write_tokens": 0,
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": done,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": generation.prompt_tokens + done,
            }
        return {
            "id": generation.id,
            "created_at": generation.created,
            "incomplete_details": _incomplete(generation, status),
            "instructions": self._body.get("instructions"),
            "metadata": self._body.get("metadata"),
            "model": generation.model,
            "object": "response",
            "output": [] if text is None else [self._item(text, self._status(generation, item=True))],
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "temperature": generation.sampling.temperature,
            "tool_choice": self._body.get("tool_choice", "auto" if self._body.get("tools") else "none"),
            "tools": self._body.get("tools") or [],
            "top_p": generation.sampling.top_p,
            "background": False,
            "max_output_tokens": generation.sampling.asked_tokens,
            "max_tool_calls": self._body.get("max_tool_calls"),
            "previous_response_id": None,
            "prompt": None,
            **({name: self._echo(name) for name in _CACHE_FIELDS} if marks else {}),
            "reasoning": self._body.get("reasoning"),
            **({"safety_identifier": self._body.get("safety_identifier")} if marks else {}),
            "service_tier": self._body.get("service_tier", "auto"),
            "status": status,
            "text": self._body.get("text"),
            "top_logprobs": None,
            "truncation": self._body.get("truncation", "disabled"),
            "usage": usage,
            "user": self._body.get("user"),
            **({} if times is None else {"metrics": times}),
            "presence_penalty": self._body.get("presence_penalty") or 0.0,
            "frequency_penalty": self._body.get("frequency_penalty") or 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


_CACHE_FIELDS = ("prompt_cache_options", "prompt_cache_key", "prompt_cache_retention")


def _incomplete(generation: Generation, status: str) -> dict[str, str] | None:
    """Return the reason of an incomplete response, None for others."""
    if status != "incomplete":
        return None
    why = generation.choices[0].plan.finish
    return {"reason": "max_output_tokens" if why == "length" else why}


_MESSAGE_ENDS = {"length": "max_tokens", "stop": "end_turn", "cache_threshold": "cache_threshold"}


class MessagesStyle:
    """Formats Anthropic messages: one block of text."""

    def begin(self, generation: Generation) -> None:
        """Do nothing: events have no common part."""

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format text deltas, between the start and the stop of their block."""
        out: list[bytes] = []
        if first == 0:
            usage = {"input_tokens": generation.prompt_tokens, "output_tokens": 0}
            message: dict[str, Any] = {
                "id": generation.id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": generation.model,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            out.append(_anthropic_event("message_start", message=message))
            out.append(
                _anthropic_event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
            )
        text = _encode_text(choice, generation, first, count)
        if text:
            out.append(
                b'event: content_block_delta\ndata: {"type":"content_block_delta",'
                b'"delta":{"type":"text_delta","text":"%b"},"index":0}\n\n' % text
            )
        if last:
            out.append(_anthropic_event("content_block_stop", index=0))
        return b"".join(out)

    def close(self, generation: Generation) -> bytes:
        """Format the stop reason and the usage."""
        choice = generation.choices[0]
        delta = {"stop_reason": self._end(choice), "stop_sequence": self._sequence(choice)}
        return _anthropic_event(
            "message_delta", delta=delta, usage=self._usage(generation)
        ) + _anthropic_event("message_stop")

    def reject(self, generation: Generation, error: ApiError) -> bytes:
        """Format an error as the only event."""
        kind = use_anthropic_form(error, generation.worker.release).kind
        return _anthropic_event("error", error={"type": kind, "message": str(error)})

    def whole(self, generation: Generation) -> bytes:
        """Format the whole message."""
        choice = generation.choices[0]
        body: dict[str, Any] = {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choice.plan.text(generation.worker.texts, choice.emitted)}],
            "model": generation.model,
            "stop_reason": self._end(choice),
        }
        if self._sequence(choice) is not None:
            body["stop_sequence"] = self._sequence(choice)
        body["usage"] = self._usage(generation)
        return msgspec.json.encode(body)

    def _usage(self, generation: Generation) -> dict[str, int]:
        done = generation.choices[0].emitted
        usage = {"input_tokens": generation.prompt_tokens, "output_tokens": done}
        if generation.worker.settings.enable_prompt_tokens_details:
            cached = generation.cached_tokens(last=True)
            usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return usage

    def _end(self, choice: Choice) -> str | None:
        """Return the stop reason; None for an abort, which Anthropic does not define."""
        return (
            "stop_sequence" if self._sequence(choice) is not None else _MESSAGE_ENDS.get(choice.plan.finish)
        )

    def _sequence(self, choice: Choice) -> str | None:
        return choice.plan.stop_reason if isinstance(choice.plan.stop_reason, str) else None
