"""Answer formats of `/v1/completions` and `/v1/chat/completions`, as trtllm-serve has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import chat_logprobs, completion_logprobs
from understudy.server.trtllm.errors import stream_error

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation

_PER_PASS = 1.0
"""Tokens that a pass adds to a request, without speculation."""


class TrtStyle:
    """Parts that completions and chats share."""

    object = ""
    """Value of `object` in chunks."""

    def begin(self, generation: Generation) -> None:
        """Do nothing: chunks are made one by one."""

    def close(self, generation: Generation) -> bytes:
        """Format the usage, if requested, and the end of the stream."""
        if not generation.sampling.include_usage:
            return DONE
        body = {**self._head(generation), "choices": [], "usage": self._usage(generation)}
        return _event(body) + DONE

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event."""
        return stream_error(error) + DONE

    def _head(self, generation: Generation) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": self.object,
            "created": generation.created,
            "model": generation.model,
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        firsts = generation.choices[:: max(generation.sampling.n, 1)]
        cached = sum(one.request.cached_tokens for one in firsts if one.request is not None)
        return _count(generation.prompt_tokens, generation.completion_tokens, cached)

    def _so_far(self, generation: Generation, choice: Choice) -> dict[str, Any] | None:
        if not generation.sampling.continuous_usage:
            return None
        cached = 0 if choice.request is None else choice.request.cached_tokens
        return _count(len(choice.prompt), choice.emitted, cached)

    def _text(self, generation: Generation, choice: Choice, first: int, count: int) -> str:
        texts, plan = generation.worker.texts, choice.plan
        if plan.pieces is None:
            return texts.tokenizer.decode(plan.tokens[first : first + count])
        return "".join(plan.pieces[first : first + count])


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _count(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _end(choice: Choice, *, last: bool) -> dict[str, Any]:
    """Return the fields of a choice's end; None for both before it."""
    plan = choice.plan
    finish = plan.finish if choice.tool is None else "tool_calls"
    return {
        "finish_reason": finish if last else None,
        "stop_reason": plan.stop_reason if last else None,
    }


class CompletionStyle(TrtStyle):
    """Formats completions."""

    object = "text_completion"

    def __init__(self, *, echo: bool = False, echo_text: list[str] | None = None) -> None:
        self._echo = echo
        self._echo_texts = echo_text or []

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the text of these tokens; the last chunk has the finish reason."""
        text = self._text(generation, choice, first, count)
        if first == 0 and self._echo:
            text = self._prompt(generation, choice) + text
        logprobs = None
        if generation.sampling.logprobs is not None:
            logprobs = completion_logprobs(generation, choice, first, count)
        fields = {
            "index": choice.index,
            "text": text,
            "token_ids": None,
            "logprobs": logprobs,
            **_end(choice, last=last),
            "avg_decoded_tokens_per_iter": _PER_PASS,
        }
        body = {**self._head(generation), "choices": [fields], "usage": self._so_far(generation, choice)}
        return _event(body)

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer with every key."""
        choices = []
        for choice in generation.choices:
            text = choice.plan.text(generation.worker.texts, choice.emitted)
            logprobs = None
            if generation.sampling.logprobs is not None:
                choice.decoded = 0
                logprobs = completion_logprobs(generation, choice, 0, choice.emitted)
            choices.append(
                {
                    "index": choice.index,
                    "text": self._prompt(generation, choice) + text if self._echo else text,
                    "token_ids": None,
                    "logprobs": logprobs,
                    "context_logits": None,
                    **_end(choice, last=True),
                    "disaggregated_params": None,
                    "avg_decoded_tokens_per_iter": _PER_PASS,
                }
            )
        body = {**self._head(generation), "choices": choices, "usage": self._usage(generation)}
        return msgspec.json.encode({**body, "prompt_token_ids": None})

    def _prompt(self, generation: Generation, choice: Choice) -> str:
        place = choice.index // max(generation.sampling.n, 1)
        return self._echo_texts[place] if place < len(self._echo_texts) else ""


class ChatStyle(TrtStyle):
    """Formats chat answers. A stream starts with the roles of all choices; its chunks have no empty keys."""

    object = "chat.completion.chunk"

    def __init__(self, role: str = "assistant") -> None:
        self._role = role
        self._begun = False

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the text of these tokens, after the roles if they are the first."""
        out = b""
        if not self._begun:
            self._begun = True
            for one in generation.choices:
                usage = self._so_far(generation, one)
                if usage is not None:
                    usage |= {"total_tokens": len(one.prompt), "completion_tokens": 0}
                out += self._chunk(
                    generation, {"index": one.index, "delta": {"role": self._role}}, usage, b" "
                )
        delta: dict[str, Any] = {"content": self._text(generation, choice, first, count)}
        if choice.tool is not None:
            delta = {"tool_calls": [{**choice.tool, "index": 0}]} if last else {}
        fields: dict[str, Any] = {"index": choice.index, "delta": delta}
        if generation.sampling.logprobs is not None:
            fields["logprobs"] = chat_logprobs(generation, choice, first, count)
        fields |= {name: value for name, value in _end(choice, last=last).items() if value is not None}
        fields["avg_decoded_tokens_per_iter"] = _PER_PASS
        return out + self._chunk(generation, fields, self._so_far(generation, choice))

    def _chunk(
        self, generation: Generation, choice: dict[str, Any], usage: dict[str, Any] | None, space: bytes = b""
    ) -> bytes:
        body = {**self._head(generation), "choices": [choice]}
        if usage is not None:
            body["usage"] = usage
        return b"data: " + msgspec.json.encode(body) + space + b"\n\n"

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer with every key."""
        choices = []
        for choice in generation.choices:
            text = choice.plan.text(generation.worker.texts, choice.emitted)
            message: dict[str, Any] = {
                "role": self._role,
                "content": text if choice.tool is None else "",
                "reasoning_content": None,
                "reasoning": None,
                "tool_calls": [] if choice.tool is None else [choice.tool],
            }
            logprobs = None
            if generation.sampling.logprobs is not None:
                logprobs = chat_logprobs(generation, choice, 0, choice.emitted)
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": logprobs,
                    **_end(choice, last=True),
                    "mm_embedding_handle": None,
                    "disaggregated_params": None,
                    "avg_decoded_tokens_per_iter": _PER_PASS,
                }
            )
        head = {**self._head(generation), "object": "chat.completion"}
        rest = {"prompt_token_ids": None, "prompt_token_ids_b64": None}
        return msgspec.json.encode({**head, "choices": choices, "usage": self._usage(generation), **rest})
