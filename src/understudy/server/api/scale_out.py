"""Routes of `--enable-scale-out`: render prompts to tokens, generate from tokens, detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.anthropic import check_anthropic, to_chat_messages
from understudy.server.api.derender import Derender
from understudy.server.api.developer import abort
from understudy.server.api.errors import ApiError, Problem, bad_request, invalid_body
from understudy.server.api.fields import Fields, read_body, read_object
from understudy.server.api.generate import GenerateStyle
from understudy.server.api.ids import new_id
from understudy.server.api.schema import MESSAGES, Shape
from understudy.server.api.type_checks import check_types

if TYPE_CHECKING:
    from understudy.http import Connection, Request
    from understudy.server.api.endpoints import Endpoints
    from understudy.server.api.reading import Read
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
    "stream_options": Shape("any"),
    "cache_salt": Shape("str"),
    "priority": Shape("int", null=False, least=-(2**63), most=2**63 - 1),
    "kv_transfer_params": Shape("object"),
    "ec_transfer_params": Shape("object"),
}

_BOOL, _INT, _FLOAT = Shape("bool", null=False), Shape("int", null=False), Shape("float", null=False)
_SAMPLING = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), _INT),
    **dict.fromkeys(
        ("max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget"), Shape("int")
    ),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"),
        _FLOAT,
    ),
    **dict.fromkeys(
        (
            *("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "skip_clone", "skip_reading_prefix_cache"),
        ),
        _BOOL,
    ),
    **dict.fromkeys(("extra_args", "structured_outputs", "logit_bias"), Shape("object")),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), Shape("ints")),
    "bad_words": Shape("strs"),
}
"""Types of vLLM's sampling parameters. Unknown fields are ignored, as in vLLM."""


class ScaleOut:
    """Answers the scale-out routes of one worker."""

    def __init__(self, worker: Worker, endpoints: Endpoints) -> None:
        self._worker = worker
        self._endpoints = endpoints
        self.generators = {"/inference/v1/generate": self._generate}
        self.plain = {
            "/v1/completions/render": {"POST": self._render_completions},
            "/v1/chat/completions/render": {"POST": self._render_chat},
            "/v1/messages/render": {"POST": self._render_messages},
            "/v1/responses/render": {"POST": self._render_responses},
            "/inference/v1/abort_requests": {"POST": self._abort},
            **Derender(worker).plain,
        }

    def _generate(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        fields = Fields(body)
        check_types(fields, _GENERATE)
        if body.get("token_ids") == []:
            fields.note("too_short", "token_ids", "must not be empty", [])
        fields.done()
        tokens, given = fields.integers("token_ids"), fields.object("sampling_params") or {}
        _check_sampling(given)
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
        read = self._endpoints.reads.completion(body)
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
        except ApiError as error:  # this route uses the error form of the other render routes
            error.anthropic = False
            raise
        chat = {
            "model": body["model"],
            "max_tokens": body["max_tokens"],
            "messages": to_chat_messages(body),
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
        read = self._endpoints.reads.chat(body)
        return self._rendered(body, read, read.prompts[0], f"{prefix}{_name(request, read)}")

    def _rendered(self, body: dict[str, Any], read: Read, tokens: list[int], name: str) -> dict[str, Any]:
        """Build the `generate` request that has an equal answer."""
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
        for field in _SAMPLED:  # requested values that differ from the defaults
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


def _check_sampling(given: dict[str, Any]) -> None:
    """Check the types of sampling parameters. ApiError names the whole object first, as vLLM."""
    sampling = Fields(given, "body.sampling_params")
    check_types(sampling, _SAMPLING)
    stop = given.get("stop")
    if not (
        stop is None
        or isinstance(stop, str)
        or (isinstance(stop, list) and all(isinstance(s, str) for s in stop))
    ):
        sampling.note("string_type", "stop", "must be a text or a list of texts", stop)
    if "output_kind" in given and given["output_kind"] not in (0, 1, 2):
        sampling.note("enum", "output_kind", "must be 0, 1 or 2", given["output_kind"])
    if sampling.problems:
        whole = Problem("is_instance_of", "body.sampling_params", "must be sampling parameters", given)
        raise invalid_body([whole, *sampling.problems])


def _name(request: Request, read: Read) -> str:
    return request.headers.get("x-request-id") or read.sampling.request_id or new_id()
