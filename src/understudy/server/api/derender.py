"""Detokenization of `/inference/v1/generate` answers, whole or by chunk, into OpenAI's forms.

The server keeps no stream state: the client receives it with a chunk and sends it back with the next one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.server.api.derender_forms import (
    CONTEXT_TOKENS,
    Answer,
    Choice,
    Part,
    StreamState,
    Whole,
    WholeChat,
    read_form,
    streams,
)
from understudy.server.api.errors import ApiError, Problem, invalid_body, no_such_model
from understudy.server.api.fields import read_body

if TYPE_CHECKING:
    from understudy.http import Request
    from understudy.server.worker import Worker

_SEED_TOKENS = 5
"""Last prompt tokens that give the tokenizer context for the first output token."""
_UNREAD = "�"
_MOST_UNREAD = 64
"""Most tokens held back for an incomplete character; then they are decoded as they are."""


class _Texts(NamedTuple):
    """Object names of one of OpenAI's forms."""

    whole: str
    chunk: str
    chat: bool


_COMPLETION = _Texts("text_completion", "text_completion", chat=False)
_CHAT = _Texts("chat.completion", "chat.completion.chunk", chat=True)


class Derender:
    """Answers the derender routes of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.plain = {
            "/v1/completions/derender": {"POST": self._completion},
            "/v1/chat/completions/derender": {"POST": self._chat},
        }

    # ── Whole ──

    def _completion(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        if streams(body, "body"):
            return 200, self._part(read_form(body, Part, "body"), _COMPLETION)
        asked = read_form(body, Whole, "body")
        self._check_model(asked.model)
        answers = asked.generate_responses
        for given, name in (
            (asked.prompt_tokens, "prompt_tokens"),
            (asked.prompt_token_ids, "prompt_token_ids"),
        ):
            if given is not None and len(given) != len(answers):
                raise invalid_body([Problem("value_error", "body", f"{name}: one for each response", given)])
        if not answers:
            raise ApiError("generate_responses must not be empty")
        for number, answer in enumerate(answers):
            ids = None if asked.prompt_token_ids is None else asked.prompt_token_ids[number]
            self._check_bounds(answer, ids)
        skip = _skips_special(asked.completion_request)
        choices: list[dict[str, Any]] = []
        for number, answer in enumerate(answers):
            ids = None if asked.prompt_token_ids is None else asked.prompt_token_ids[number]
            for choice in answer.choices:
                text, _state = self._read_on(choice, self._seed(ids, answer), skip=skip)
                choices.append(
                    {
                        **_ended(choice),
                        "index": len(choices),
                        "text": text,
                        "logprobs": self._completion_logprobs(choice, 0),
                        **dict.fromkeys(
                            ("token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts")
                        ),
                    }
                )
        params = answers[0].kv_transfer_params
        reply = self._build_answer(answers[0], asked.model, _COMPLETION.whole, choices)
        reply["usage"] = _usage(sum(asked.prompt_tokens or []), _tokens(answers))
        reply["kv_transfer_params"] = (
            params if all(one.kv_transfer_params == params for one in answers) else None
        )
        reply["metrics"] = answers[0].metrics if len(answers) == 1 else None
        return 200, {**reply, "service_tier": None, "ec_transfer_params": None}

    def _chat(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        if streams(body, "body.DerenderChatRequest"):
            return 200, self._part(read_form(body, Part, "body.DerenderChatRequest"), _CHAT)
        asked = read_form(body, WholeChat, "body.DerenderChatRequest")
        self._check_model(asked.model)
        answer = asked.generate_response
        self._check_bounds(answer, asked.prompt_token_ids)
        self._check_parser(asked.chat_request)
        skip, shows = _skips_special(asked.chat_request), _shows_ids(asked.chat_request)
        choices = []
        for choice in answer.choices:
            text, _state = self._read_on(choice, self._seed(asked.prompt_token_ids, answer), skip=skip)
            message = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            choices.append(
                {
                    **_ended(choice),
                    "index": choice.index,
                    "message": {"role": "assistant", "content": text, **message},
                    "logprobs": self._chat_logprobs(choice),
                    "token_ids": choice.token_ids if shows else None,
                    "routed_experts": None,
                }
            )
        reply = self._build_answer(answer, asked.model, _CHAT.whole, choices)
        reply["usage"] = _usage(asked.prompt_tokens or 0, _tokens([answer]))
        reply |= {"prompt_logprobs": answer.prompt_logprobs, "kv_transfer_params": answer.kv_transfer_params}
        rest = dict.fromkeys(("service_tier", "prompt_token_ids", "prompt_text", "ec_transfer_params"))
        return 200, {**reply, "metrics": answer.metrics, **rest}

    # ── Chunk by chunk ──

    def _part(self, asked: Part, form: _Texts) -> dict[str, Any]:
        self._check_model(asked.model)
        answer, state = asked.generate_chunk, asked.stream_state
        wanted = asked.chat_request if form.chat else asked.completion_request
        if form.chat:
            self._check_parser(wanted)
            if self._worker.settings.tool_call_parser is not None and asked.prompt_token_ids is None:
                raise ApiError("prompt_token_ids are needed with --tool-call-parser")
        if len(answer.choices) > 1:
            raise ApiError("a chunk has one choice at most")
        before = 0 if state is None else len(state.output_token_ids)
        given = len(asked.prompt_token_ids or ())
        limit = self._worker.settings.max_model_len
        if given + before + _tokens([answer]) > limit:
            raise ApiError(f"prompt, outputs so far and those of this chunk are more than {limit} tokens")
        if state is None:
            state = self._seed(asked.prompt_token_ids, answer)
        choices: list[dict[str, Any]] = []
        for choice in answer.choices:
            text, state = self._read_on(choice, state, skip=_skips_special(wanted), may_be_empty=True)
            shown: dict[str, Any] = {**_ended(choice), "index": choice.index}
            if form.chat:
                role = None if state.role_sent else "assistant"
                shown["delta"] = {"role": role, "content": text or None, "reasoning": None}
                shown["logprobs"] = self._chat_logprobs(choice)
                shown["token_ids"] = choice.token_ids if _shows_ids(wanted) else None
                state.role_sent = True
            else:
                logprobs = self._completion_logprobs(choice, state.logprob_text_offset)
                shown |= {"text": text, "logprobs": logprobs, "prompt_token_ids": None, "token_ids": None}
                state.logprob_text_offset += len(text)
            seen = [*state.logprob_context_token_ids, *(choice.token_ids or ())]
            state.logprob_context_token_ids = seen[-CONTEXT_TOKENS:]
            choices.append(shown)
        chunk = self._build_answer(answer, asked.model, form.chunk, choices)
        if form.chat:
            chunk |= {"prompt_token_ids": None, "prompt_text": None}
        usage = answer.usage
        if usage is not None:
            prompt = usage.prompt_tokens if asked.prompt_tokens is None else asked.prompt_tokens
            chunk["usage"] = _usage(prompt, usage.completion_tokens or 0)
        return {"chunk": {**chunk, "metrics": answer.metrics}, "stream_state": state}

    def _seed(self, prompt: list[int] | None, answer: Answer) -> StreamState:
        """Make the state before the first output token, from the end of the prompt."""
        tail = (answer.prompt_token_ids if prompt is None else prompt) or []
        words = [str(token) for token in tail[-_SEED_TOKENS:]]
        return StreamState(prev_tokens=words, read_offset=len(words))

    def _read_on(
        self, choice: Choice, state: StreamState, *, skip: bool, may_be_empty: bool = False
    ) -> tuple[str, StreamState]:
        """Return the text that the tokens add, and the new state. An incomplete character is held back."""
        if not choice.token_ids and not may_be_empty:
            raise ApiError(f"choice {choice.index} has no token_ids")
        limit = self._worker.tokenizer.vocabulary
        if any(token >= limit for token in choice.token_ids or ()):
            raise ApiError(f"choice {choice.index}: a token is not in the vocabulary")
        window = [int(word) for word in state.prev_tokens if word.isdecimal() and len(word) < 10]
        window = [token for token in window if token < limit]
        first, read = state.prefix_offset, state.read_offset
        if len(window) != len(state.prev_tokens) or not first <= read <= len(window):
            raise ApiError("invalid stream_state: it is none that was given out here")
        decode = self._worker.tokenizer.decode
        text = ""
        for token in choice.token_ids or ():
            window.append(token)
            known = decode(window[first:read], skip_special=skip)
            longer = decode(window[first:], skip_special=skip)
            complete = len(longer) > len(known) and not longer.endswith(_UNREAD)
            if complete or len(window) - read > _MOST_UNREAD:
                text += longer[len(known) :]
                first, read = read, len(window)
        if not may_be_empty and read < len(window):  # nothing follows
            text += decode(window[first:], skip_special=skip)[
                len(decode(window[first:read], skip_special=skip)) :
            ]
        kept = [str(token) for token in window[first:]]
        return text, msgspec.structs.replace(
            state, prev_tokens=kept, prefix_offset=0, read_offset=read - first
        )

    # ── Parts ──

    def _build_answer(
        self, answer: Answer, model: str | None, kind: str, choices: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "id": answer.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model or self._worker.settings.names[0],
            "choices": choices,
            "usage": None,
            "system_fingerprint": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._worker.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _chat_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(top.token_id, top.logprob) for top in entry.top_logprobs],
                }
                for entry in choice.logprobs.content or ()
            ]
        }

    def _completion_logprobs(self, choice: Choice, offset: int) -> dict[str, Any] | None:
        logprobs = self._chat_logprobs(choice)
        if logprobs is None:
            return None
        offsets = []
        for entry in logprobs["content"]:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in logprobs["content"]],
            "tokens": [entry["token"] for entry in logprobs["content"]],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} or None
                for entry in logprobs["content"]
            ],
        }

    def _check_model(self, name: str | None) -> None:
        names = (*self._worker.settings.names, *self._worker.loras)
        if name and name not in names:
            raise no_such_model(name, names)

    def _check_bounds(self, answer: Answer, prompt: list[int] | None) -> None:
        limit = self._worker.settings.max_model_len
        for choice in answer.choices:
            if len(choice.token_ids or ()) > limit:
                raise ApiError(f"choice {choice.index} has more than {limit} token_ids")
        if len(prompt or ()) > limit:
            raise ApiError(f"prompt_token_ids are more than {limit}")

    def _check_parser(self, wanted: dict[str, Any] | None) -> None:
        """Raise ApiError when a tool parser is set and the rendered request is missing."""
        if self._worker.settings.tool_call_parser is not None and wanted is None:
            raise ApiError("chat_request is needed with --tool-call-parser")


def _skips_special(request: dict[str, Any] | None) -> bool:
    return (request or {}).get("skip_special_tokens", True) is not False


def _shows_ids(request: dict[str, Any] | None) -> bool:
    return (request or {}).get("return_token_ids") is True


def _ended(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _tokens(answers: list[Answer]) -> int:
    return sum(len(choice.token_ids or ()) for answer in answers for choice in answer.choices)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
