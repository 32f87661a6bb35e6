"""What `--enable-scale-out` opens: prompts rendered to tokens, tokens generated from tokens, tokens read as text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from understudy.server.api.anthropic import check_anthropic, messages_of
from understudy.server.api.completions import FINGERPRINT
from understudy.server.api.developer import abort
from understudy.server.api.errors import ApiError, Problem, bad_request, invalid_body
from understudy.server.api.fields import Fields, read_body, read_object
from understudy.server.api.generate import GenerateStyle
from understudy.server.api.generation import new_id
from understudy.server.api.schema import MESSAGES, Shape, check_types

if TYPE_CHECKING:
    from understudy.server.api.endpoints import Endpoints, Read
    from understudy.server.http import Connection, Request
    from understudy.server.worker import Worker

_SAMPLED = (
    *(
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *(
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "bad_words",
    ),
    *(
        "include_stop_str_in_output",
        "skip_special_tokens",
        "structured_outputs",
        "logit_bias",
        "allowed_token_ids",
    ),
)

_GENERATE = {
    "request_id": Shape("str", null=False),
    "token_ids": Shape("ints", null=False, required=True, least=0, most=2**63 - 1),
    "features": Shape("object"),
    "content_parts": Shape("objects"),
    "sampling_params": Shape("object", null=False, required=True),
    "model": Shape("str"),
    "return_token_ids": Shape("bool"),
    "output_mode": Shape("str", null=False, choices=("tokens", "text")),
    "stream": Shape("bool"),
    "stream_options": Shape("object"),
    "cache_salt": Shape("str"),
    "priority": Shape("int", null=False, least=-(2**63), most=2**63 - 1),
    "kv_transfer_params": Shape("object"),
    "ec_transfer_params": Shape("object"),
}
_DERENDER = {
    "model": Shape("str"),
    "generate_responses": Shape("objects", null=False, required=True),
    "prompt_tokens": Shape("ints"),
}
_DERENDER_CHAT = {
    "model": Shape("str"),
    "generate_response": Shape("object", null=False, required=True),
    "prompt_tokens": Shape("int"),
}


class ScaleOut:
    """Answers for one worker."""

    def __init__(self, worker: Worker, endpoints: Endpoints) -> None:
        self._worker = worker
        self._endpoints = endpoints
        self.generators = {"/inference/v1/generate": self._generate}
        self.plain = {
            "/v1/completions/render": {"POST": self._render_completions},
            "/v1/chat/completions/render": {"POST": self._render_chat},
            "/v1/messages/render": {"POST": self._render_messages},
            "/v1/responses/render": {"POST": self._render_responses},
            "/v1/completions/derender": {"POST": self._derender},
            "/v1/chat/completions/derender": {"POST": self._derender_chat},
            "/inference/v1/abort_requests": {"POST": self._abort},
        }

    def _generate(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        fields = Fields(body)
        check_types(fields, _GENERATE)
        if body.get("token_ids") == []:
            fields.note("too_short", "token_ids", "must not be empty", [])
        fields.done()
        tokens, given = fields.integers("token_ids"), fields.object("sampling_params") or {}
        if body.get("features") or body.get("content_parts"):
            raise ApiError("media are not played")
        room = max(self._worker.settings.max_model_len - len(tokens), 1)
        asked = given.get("max_tokens")
        completion = {
            **{name: given[name] for name in _SAMPLED if given.get(name) is not None},
            **{
                name: body[name]
                for name in ("model", "stream", "stream_options", "cache_salt", "priority", "request_id")
                if body.get(name) is not None
            },
            "prompt": tokens,
            "max_tokens": room if asked is None else asked,
            "kv_transfer_params": body.get("kv_transfer_params"),
        }
        style = GenerateStyle(
            text=fields.text("output_mode") == "text", shows_prompt=fields.boolean("return_token_ids")
        )
        self._endpoints.completions(completion, request, connection, style, "generate-tokens-")

    def _abort(self, request: Request, _: dict[str, str]) -> tuple[int, None]:
        named = read_object(request).get("request_ids")
        if named is None:
            raise bad_request("the body names no request_ids")
        if isinstance(named, list | str):
            abort(self._worker, named)
        return 200, None

    # ── Rendered ──

    def _render_completions(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        read = self._endpoints.read_completion(body)
        name = f"cmpl-{_name(request, read)}"
        names = [name] if len(read.prompts) == 1 else [f"{name}-{n}" for n in range(len(read.prompts))]
        return 200, [
            self._rendered(body, read, tokens, named)
            for tokens, named in zip(read.prompts, names, strict=True)
        ]

    def _render_chat(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        return 200, self._chat(read_body(request), request, "chatcmpl-")

    def _render_messages(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        try:
            check_anthropic(body, MESSAGES)
        except ApiError as error:  # this route speaks as its neighbours do
            error.anthropic = False
            raise
        chat = {
            "model": body["model"],
            "max_tokens": body["max_tokens"],
            "messages": messages_of(body),
            "stream": bool(body.get("stream")),
        }
        return 200, self._chat(chat, request, "chatcmpl-")

    def _render_responses(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        fields = Fields(body)
        if not isinstance(body.get("input"), str | list):
            fields.note("missing", "input", "must be a text or items", body.get("input"))
        fields.done()
        if body.get("previous_response_id") is not None:
            raise ApiError(
                "no response is kept to go on from",
                kind="invalid_request_error",
                param="previous_response_id",
            )
        given = body["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        chat = {"messages": messages, "max_tokens": body.get("max_output_tokens"), "model": body.get("model")}
        return 200, self._chat(chat, request, "resp_")

    def _chat(self, body: dict[str, Any], request: Request, prefix: str) -> dict[str, Any]:
        read = self._endpoints.read_chat(body)
        return self._rendered(body, read, read.prompts[0], f"{prefix}{_name(request, read)}")

    def _rendered(self, body: dict[str, Any], read: Read, tokens: list[int], name: str) -> dict[str, Any]:
        """A request to `generate` that has the same answer."""
        sampling = read.sampling
        left = max(self._worker.settings.max_model_len - len(tokens), 1)
        params: dict[str, Any] = {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "max_tokens": min(left if sampling.asked_tokens is None else sampling.asked_tokens, left),
            "output_kind": 1 if sampling.stream else 2,
            "skip_clone": True,
            "bad_words": [],
            "skip_reading_prefix_cache": False,
        }
        for field in _SAMPLED:  # what was asked for and is no default
            if body.get(field) is not None and field not in ("stop", "logprobs"):
                params[field] = body[field]
        if sampling.logprobs is not None:
            params["logprobs"] = sampling.logprobs
        return {
            "request_id": name,
            "token_ids": tokens,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": params,
            "model": body.get("model"),
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": sampling.stream,
            "stream_options": body.get("stream_options") if sampling.stream else None,
            "cache_salt": body.get("cache_salt"),
            "priority": sampling.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    # ── Read as text ──

    def _derender(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        check_types(fields, _DERENDER)
        fields.done()
        choices: list[dict[str, Any]] = []
        responses: list[Any] = fields.raw("generate_responses")
        for one in responses:
            for choice in _choices(one):
                text = self._text(choice)
                choices.append({**_ended(choice), "index": len(choices), "text": text, "logprobs": None})
        name = str(responses[0].get("request_id", "")) if responses else ""
        return 200, self._whole(fields, name, "text_completion", choices, responses)

    def _derender_chat(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        if not fields.has("generate_response"):
            where = "body.DerenderChatRequest.generate_response"
            raise invalid_body([Problem("missing", where, "must be given")])
        check_types(fields, _DERENDER_CHAT)
        fields.done()
        response = fields.object("generate_response") or {}
        choices = [
            {
                **_ended(choice),
                "index": place,
                "message": {"role": "assistant", "content": self._text(choice), "refusal": None},
                "logprobs": None,
            }
            for place, choice in enumerate(_choices(response))
        ]
        name = str(response.get("request_id", ""))
        return 200, self._whole(fields, name, "chat.completion", choices, [response])

    def _text(self, choice: dict[str, Any]) -> str:
        return self._worker.tokenizer.decode(choice["token_ids"])

    def _whole(
        self, fields: Fields, name: str, kind: str, choices: list[dict[str, Any]], responses: list[Any]
    ) -> dict[str, Any]:
        given = fields.raw("prompt_tokens")
        prompt = sum(given) if isinstance(given, list) else int(given or 0)
        completion = sum(len(choice["token_ids"]) for one in responses for choice in _choices(one))
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": fields.text("model") or self._worker.settings.names[0],
            "choices": choices,
            "system_fingerprint": FINGERPRINT.decode(),
            "usage": {
                "prompt_tokens": prompt,
                "total_tokens": prompt + completion,
                "completion_tokens": completion,
            },
        }


def _name(request: Request, read: Read) -> str:
    return request.headers.get("x-request-id") or read.sampling.request_id or new_id()


def _choices(response: Any) -> list[dict[str, Any]]:
    """Those of an answer of `generate`. ApiError when it is none."""
    found = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(found, list) or not all(_is_choice(one) for one in found):
        raise ApiError("this is no answer of /inference/v1/generate: its choices have token_ids")
    return found


def _is_choice(one: Any) -> bool:
    ids = one.get("token_ids") if isinstance(one, dict) else None
    return isinstance(ids, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in ids)


def _ended(choice: dict[str, Any]) -> dict[str, Any]:
    return {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
