"""Answer formats of `/v1/completions` and `/v1/chat/completions`, as SGLang has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.generation import DONE
from understudy.server.api.logprobs import chat_logprobs, completion_logprobs
from understudy.server.api.texts import json_text
from understudy.server.sglang.errors import error_bytes
from understudy.server.sglang.meta import finish_reason

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation


class OpenAiStyle:
    """Parts that completions and chats share."""

    object = ""
    """Value of `object` in chunks."""

    def begin(self, generation: Generation) -> None:
        """Do nothing: SGLang gives every choice its own id."""

    def close(self, generation: Generation) -> bytes:
        """Format the usage, if requested, and the end of the stream."""
        if not generation.sampling.include_usage:
            return DONE
        usage = self._usage(generation)
        known = {name: value for name, value in usage.items() if value is not None}
        head = self._head(generation, generation.choices[-1])
        return b"data: " + msgspec.json.encode({**head, "choices": [], "usage": known}) + b"\n\n" + DONE

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Format an error as the only event."""
        nested = msgspec.Raw(error_bytes(error, ""))
        return b"data: " + msgspec.json.encode({"error": nested}) + b"\n\n" + DONE

    def _head(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        return {
            "id": generation.request_name(choice),
            "object": self.object,
            "created": generation.created,
            "model": generation.model,
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        details = None
        if generation.worker.settings.enable_prompt_tokens_details:
            firsts = generation.choices[:: max(generation.sampling.n, 1)]
            found = sum(one.request.cached_tokens for one in firsts if one.request is not None)
            details = {"cached_tokens": found}
        return _count(generation.prompt_tokens, generation.completion_tokens, details)

    def _so_far(self, choice: Choice) -> dict[str, Any]:
        return _count(len(choice.prompt), choice.emitted, None)

    def _whole(self, generation: Generation, kind: str, choices: list[dict[str, Any]]) -> bytes:
        return msgspec.json.encode(
            {
                **self._head(generation, generation.choices[0]),
                "object": kind,
                "choices": choices,
                "usage": self._usage(generation),
                "metadata": {"weight_version": generation.worker.weight_version},
            }
        )


def _count(prompt: int, completion: int, details: dict[str, int] | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _end(generation: Generation, choice: Choice, *, last: bool) -> dict[str, Any]:
    """Return the fields of a choice's end; None for both before it."""
    reason = finish_reason(generation, choice) if last else {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


class CompletionStyle(OpenAiStyle):
    """Formats completions."""

    object = "text_completion"

    def __init__(self, *, echo: bool = False, echo_text: list[str] | None = None) -> None:
        self._echo = echo
        self._echo_texts = echo_text or []

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:
        """Format the text of these tokens; the last chunk has the finish reason."""
        plan, sampling = choice.plan, generation.sampling
        pieces = plan.pieces
        if pieces is None:
            plain = generation.worker.texts.plain
            text = b"".join(plain[token] for token in plan.tokens[first : first + count])
        else:
            text = json_text("".join(pieces[first : first + count]))
        if first == 0 and self._echo:
            text = json_text(self._prompt(generation, choice)) + text
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = completion_logprobs(generation, choice, first, count)
        fields: dict[str, Any] = {
            "index": choice.index,
            "text": msgspec.Raw(b'"' + text + b'"'),
            "logprobs": logprobs,
            **_end(generation, choice, last=last),
        }
        if sampling.return_token_ids:
            fields["token_ids"] = plan.tokens[first : first + count]
            if first == 0:
                fields["prompt_token_ids"] = choice.prompt.tolist()
        usage = self._so_far(choice) if sampling.continuous_usage else None
        body = {**self._head(generation, choice), "choices": [fields], "usage": usage}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer."""
        sampling = generation.sampling
        choices = []
        for choice in generation.choices:
            text = choice.plan.text(generation.worker.texts, choice.emitted)
            if self._echo:
                text = self._prompt(generation, choice) + text
            logprobs = None
            if sampling.logprobs is not None:
                choice.decoded = 0
                logprobs = completion_logprobs(generation, choice, 0, choice.emitted)
            fields: dict[str, Any] = {
                "index": choice.index,
                "text": text,
                "logprobs": logprobs,
                **_end(generation, choice, last=True),
            }
            if sampling.return_token_ids:
                fields["token_ids"] = choice.plan.tokens[: choice.emitted]
                fields["prompt_token_ids"] = choice.prompt.tolist()
            choices.append(fields)
        return self._whole(generation, self.object, choices)

    def _prompt(self, generation: Generation, choice: Choice) -> str:
        place = choice.index // max(generation.sampling.n, 1)
        return self._echo_texts[place] if place < len(self._echo_texts) else ""


class ChatStyle(OpenAiStyle):
    """Formats chat answers. A stream starts each choice with its role, and ends them together."""

    object = "chat.completion.chunk"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:  # noqa: ARG002
        """Format the text of these tokens, after the role if they are the first."""
        sampling = generation.sampling
        out = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            out = self._event(generation, choice, {"role": "assistant", "content": ""})
        texts, plan = generation.worker.texts, choice.plan
        pieces = plan.pieces
        if pieces is None:
            text = texts.tokenizer.decode(plan.tokens[first : first + count])
        else:
            text = "".join(pieces[first : first + count])
        if not text and sampling.logprobs is None:
            return out
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = chat_logprobs(generation, choice, first, count)
        usage = self._so_far(choice) if sampling.continuous_usage else None
        return out + self._event(generation, choice, {"content": text}, logprobs=logprobs, usage=usage)

    def close(self, generation: Generation) -> bytes:
        """Format the finish reasons of all choices, the usage if requested, and the end of the stream."""
        ends = [
            self._event(generation, choice, {}, **_end(generation, choice, last=True))
            for choice in generation.choices
        ]
        return b"".join(ends) + super().close(generation)

    def _event(
        self,
        generation: Generation,
        choice: Choice,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        matched_stop: str | int | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        body = {
            **self._head(generation, choice),
            "choices": [
                {
                    "index": choice.index,
                    "delta": {"reasoning_content": None, **delta},
                    "logprobs": logprobs,
                    "finish_reason": finish_reason,
                    "matched_stop": matched_stop,
                }
            ],
        }
        if usage is not None:
            body["usage"] = usage
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def whole(self, generation: Generation) -> bytes:
        """Format the whole answer."""
        sampling = generation.sampling
        choices = []
        for choice in generation.choices:
            text = choice.plan.text(generation.worker.texts, choice.emitted)
            message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": None}
            ended = _end(generation, choice, last=True)
            if choice.tool is not None:
                message |= {"content": "", "tool_calls": [{**choice.tool, "index": 0}]}
                ended["finish_reason"] = "tool_calls"
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = chat_logprobs(generation, choice, 0, choice.emitted)
            choices.append({"index": choice.index, "message": message, "logprobs": logprobs, **ended})
        return self._whole(generation, "chat.completion", choices)
