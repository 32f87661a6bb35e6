"""Routes of vLLM's API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import InvalidArgument, WrongState
from understudy.server.api.adapters import Adapters
from understudy.server.api.anthropic import (
    check_anthropic,
    to_chat_messages,
    to_chat_tools,
    use_anthropic_form,
)
from understudy.server.api.body_checks import check_salt
from understudy.server.api.decisions import check_decisions
from understudy.server.api.developer import Developer
from understudy.server.api.errors import ApiError, bad_request, bad_value, no_such_model
from understudy.server.api.fields import Fields, check_content_type, read_any, read_body, read_object
from understudy.server.api.ids import new_id
from understudy.server.api.openapi import pages
from understudy.server.api.prompts import chat_text, check_length, encode_within, read_messages, tokens_of
from understudy.server.api.sampling import Sampling
from understudy.server.api.scale_out import ScaleOut
from understudy.server.api.schema import COUNT, DETOKENIZE, MESSAGES, SCHEMAS, TOKENIZE, TOKENIZE_CHAT
from understudy.server.api.styles import MessagesStyle, ResponsesStyle
from understudy.server.api.type_checks import check_types
from understudy.server.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Connection, Request
    from understudy.server.api.endpoints import Endpoints
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]
    Generator = Callable[[dict[str, Any], Request, Connection], object]


class Routes:
    """Tables of routes: `generators` answer after the engine; `plain` ones at once with (status, reply)."""

    def __init__(self, worker: Worker, endpoints: Endpoints) -> None:
        self._worker = worker
        self._endpoints = endpoints
        settings = worker.settings
        self.generators: dict[str, Generator] = {
            "/v1/completions": endpoints.completions,
            "/v1/chat/completions": endpoints.chat,
            "/v1/chat/completions/batch": endpoints.batch,
            "/generative_scoring": endpoints.scoring,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/invocations": self._invocations,
        }
        self.plain: dict[str, dict[str, Plain]] = {
            "/ping": {"GET": self._nothing, "POST": self._nothing},
            "/version": {"GET": lambda *_: (200, {"version": worker.release.version})},
            "/v1/models": {"GET": self._models},
            "/kv_event_sources": {"GET": self._event_sources},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/systemone": {"POST": self._systemone},
            "/scale_elastic_ep": {"POST": self._scale},
            "/is_scaling_elastic_ep": {"POST": self._scaling},
        }
        if worker.release.has_decisions:
            self.plain["/v1/decisions"] = {"POST": self._decisions}
        closed: dict[str, Plain] = {"POST": self._scale_out}
        for path in (
            "/v1/completions/render",
            "/v1/chat/completions/render",
            "/v1/messages/render",
            "/v1/completions/derender",
            "/v1/chat/completions/derender",
            "/inference/v1/generate",
            "/inference/v1/abort_requests",
        ):
            self.plain[path] = closed
        # GET on this path requests the response named "render".
        self.plain["/v1/responses/render"] = {**closed, "GET": _no_response_of_that_name}
        if settings.enable_scale_out:
            opened = ScaleOut(worker, endpoints)
            for path in opened.generators:
                del self.plain[path]
            self.generators |= opened.generators
            for path, methods in opened.plain.items():
                self.plain[path] = {**self.plain[path], **methods}
        if settings.profile_dir is not None:
            self._profile = Profile(
                worker.cores, Path(settings.profile_dir), f"understudy-worker{worker.index}"
            )
            self.plain["/start_profile"] = {"POST": self._start_profile}
            self.plain["/stop_profile"] = {"POST": self._stop_profile}
        if settings.dev_mode:
            self.plain |= Developer(worker).plain
        self.adapters = Adapters(worker) if settings.runtime_lora else None
        if self.adapters is not None:
            self.plain |= self.adapters.plain
        if not settings.disable_fastapi_docs:
            self.plain |= pages(worker.release, lambda: [*self.plain, *self.generators], self.methods_of)

    def read(self, request: Request) -> dict[str, Any]:
        """Read the body of a generation request. ApiError when it is invalid."""
        if request.path != "/invocations":
            return read_body(request)
        check_content_type(request)
        body = read_any(request)
        if not isinstance(body, dict):
            raise ApiError("an invocation is an object")
        return body

    def methods_of(self, path: str) -> tuple[str, ...]:
        """List the methods that a path accepts."""
        return ("POST",) if path in self.generators else tuple(self.plain.get(path, {}))

    # ── Generation in other forms ──

    def _invocations(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        """Answer SageMaker's route: a chat or a completion, by the body. A header names the adapter."""
        given = {name: value for name, value in body.items() if name != "model"}
        adapter = request.headers.get("x-amzn-sagemaker-adapter-identifier")
        if adapter:
            given["model"] = adapter
        for answer in (self._endpoints.chat, self._endpoints.completions):
            try:
                answer(given, request, connection)
            except ApiError as error:
                if error.kind != "Bad Request":
                    raise
            else:
                return
        raise ApiError("this is neither a chat nor a completion")

    def _responses(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        if body.get("prompt") is not None:
            raise bad_value("prompt templates are not kept here", "prompt")
        check_salt(body)
        given = body.get("input")
        fields = Fields(body)
        if not isinstance(given, str | list):
            fields.note(
                "missing" if given is None else "string_type", "input", "must be a text or items", given
            )
        check_types(fields, SCHEMAS[self._worker.release.version].responses)
        fields.done()
        if body.get("background"):
            raise ApiError("responses are not kept here", kind="invalid_request_error", param="background")
        if body.get("previous_response_id"):
            raise no_such_response(str(body["previous_response_id"]))
        messages: list[Any] = []
        if isinstance(body.get("instructions"), str):
            messages.append({"role": "system", "content": body["instructions"]})
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else _listed(given)
        chat = {
            **{name: value for name, value in body.items() if name not in _OF_RESPONSES},
            "messages": messages,
            "max_completion_tokens": body.get("max_output_tokens"),
            "response_format": _format_of(body.get("text")),
        }
        try:
            self._endpoints.chat(chat, request, connection, ResponsesStyle(body), "resp_")
        except ApiError as error:  # name the client's field, not the translated one
            if error.param == "max_completion_tokens":
                raise ApiError(
                    str(error).replace(error.param, "max_output_tokens"), param="max_output_tokens"
                ) from None
            raise

    def _messages(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        check_anthropic(body, MESSAGES)
        names = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "vllm_xargs")
        chat = {name: body[name] for name in names if body.get(name) is not None}
        chat |= {
            "messages": to_chat_messages(body),
            "stop": body.get("stop_sequences"),
            **to_chat_tools(body),
        }
        try:
            self._endpoints.chat(chat, request, connection, MessagesStyle())
        except ApiError as error:
            raise use_anthropic_form(error, self._worker.release) from None

    # ── Answers at once ──

    def _nothing(self, *_: object) -> tuple[int, None]:
        return 200, None

    def _start_profile(self, *_: object) -> tuple[int, None]:
        try:
            self._profile.start()
        except WrongState as error:
            raise bad_request(str(error)) from None
        return 200, None

    def _stop_profile(self, *_: object) -> tuple[int, None]:
        try:
            self._profile.stop()
        except WrongState as error:
            raise bad_request(str(error)) from None
        except (InvalidArgument, OSError) as error:
            raise ApiError(f"profile: {error}", status=500, kind="Internal Server Error") from None
        return 200, None

    def _models(self, *_: object) -> tuple[int, Any]:
        worker = self._worker
        settings = worker.settings

        def card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": worker.created,
                "owned_by": "vllm",
                "root": root,
                "parent": parent,
                "max_model_len": length,
                "permission": [_permission(worker.created)],
            }

        cards = [card(name, settings.model, None, settings.max_model_len) for name in settings.names]
        cards += [card(lora.name, lora.path, settings.names[0], None) for lora in worker.loras.values()]
        return 200, {"object": "list", "data": cards}

    def _event_sources(self, *_: object) -> tuple[int, Any]:
        return 200, {str(rank): sender.describe() for rank, sender in enumerate(self._worker.senders)}

    def _tokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        worker = self._worker
        body = read_body(request)
        fields = Fields(body)
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise ApiError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        if "messages" in body and "prompt" not in body and isinstance(body["messages"], list):
            messages = read_messages(fields, "messages", worker.settings.names[0])
            check_types(fields, TOKENIZE_CHAT)
            fields.done()
            self._known_model(fields)
            trusted = worker.settings.trust_request_chat_template
            text = chat_text(fields, messages, worker.tokenizer, trusted=trusted)
        else:
            check_types(fields, TOKENIZE)
            fields.done()
            self._known_model(fields)
            text = fields.text("prompt") or ""
        show = fields.boolean("return_token_strs")
        length = worker.settings.max_model_len
        ids = encode_within(text, worker.tokenizer, length)
        strings = None
        if show:
            known = {token: worker.tokenizer.decode([token], skip_special=False) for token in set(ids)}
            strings = [known[token] for token in ids]
        return 200, {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    def _detokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        if isinstance(body.get("tokens"), list):  # before each of them is looked at
            check_length(body["tokens"], self._worker.settings.max_model_len)
        fields = Fields(body)
        check_types(fields, DETOKENIZE)
        fields.done()
        self._known_model(fields)
        tokens = fields.integers("tokens")
        known = [token for token in tokens if token < self._worker.tokenizer.vocabulary]
        return 200, {"prompt": self._worker.tokenizer.decode(known, skip_special=False)}

    def _known_model(self, fields: Fields) -> None:
        name, worker = fields.text("model"), self._worker
        if name and name not in worker.settings.names and name not in worker.loras:
            raise no_such_model(name, (*worker.settings.names, *worker.loras))

    def _count_tokens(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        check_anthropic(body, COUNT)
        fields = Fields({**body, "messages": to_chat_messages(body)})
        worker = self._worker
        try:
            self._known_model(fields)
            messages = read_messages(fields, "messages", worker.settings.names[0])
            fields.done()
            self._endpoints.reads.check_tools(Fields(to_chat_tools(body)))
            text = chat_text(fields, messages, worker.tokenizer, trusted=False)
            count = len(tokens_of(text, Sampling(), worker.tokenizer, worker.settings.max_model_len))
        except ApiError as error:
            raise use_anthropic_form(error, self._worker.release) from None
        return 200, {"input_tokens": count, "context_management": {"original_input_tokens": count}}

    def _systemone(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Reject structured decisions, which no model here supports."""
        fields = Fields(read_body(request))
        for name in ("state", "questions"):
            if fields.raw(name) is None:
                fields.note("missing", name, "must be given")
        fields.done()
        raise ApiError("this model makes no structured decisions")

    def _decisions(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Check a request for decisions and reject it, as vLLM does for models that make none."""
        check_decisions(read_body(request))
        raise ApiError("The model does not support the Decisions API", status=501, kind="NotImplementedError")

    def _scaling(self, *_: object) -> tuple[int, Any]:
        reply: dict[str, Any] = {"is_scaling_elastic_ep": False}
        if self._worker.release.has_decisions:
            reply |= {"phase": "idle", **dict.fromkeys(("epoch", "error", "requested_data_parallel_size"))}
        return 200, reply

    def _scale(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Answer a request to scale; the number of ranks is fixed, so only the current one succeeds."""
        check_content_type(request)
        body = read_object(request)
        ranks, patience_s = body.get("new_data_parallel_size"), body.get("drain_timeout", 120)
        for name, number in (("new_data_parallel_size", ranks), ("drain_timeout", patience_s)):
            if not isinstance(number, int) or number < 1:
                raise bad_request(f"{name} must be given as a whole number of 1 or more")
        if ranks != len(self._worker.cores):
            raise ApiError("this server keeps its ranks", status=500, kind="Internal Server Error")
        return 200, {"message": f"there are {ranks} data parallel engines"}

    def _scale_out(self, *_: object) -> tuple[int, Any]:
        raise ApiError(
            "Scale-out endpoints are disabled. Restart with --enable-scale-out to enable them.",
            status=403,
            kind="PermissionDeniedError",
        )


_OF_RESPONSES = (
    *("input", "tools", "tool_choice", "text", "include", "top_logprobs", "background", "store", "metadata"),
    *("reasoning", "previous_response_id", "max_tool_calls", "truncation", "service_tier", "instructions"),
)
"""Fields of a response that a chat does not have, or has in another form."""


def _no_response_of_that_name(request: Request, _: dict[str, str]) -> tuple[int, Any]:
    raise no_such_response(request.path.rpartition("/")[2])


def no_such_response(name: str) -> ApiError:
    """Build the error for a stored response; responses are not stored here."""
    return ApiError(
        f"There is no response {name!r} here.",
        status=404,
        kind="invalid_request_error",
        param="response_id",
    )


def _permission(created: int) -> dict[str, Any]:
    """Build the permission entry of a model card; clients may read `allow_sampling`."""
    allowed = {
        "sampling": True,
        "logprobs": True,
        "search_indices": False,
        "view": True,
        "fine_tuning": False,
    }
    return {
        "id": f"modelperm-{new_id()}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        **{f"allow_{name}": value for name, value in allowed.items()},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def _format_of(text: Any) -> dict[str, Any] | None:
    """Return the format of a response's text as the `response_format` of a chat."""
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form if isinstance(form, dict) else None


def _listed(given: Any) -> list[Any]:
    """Convert input items of a response to messages; ignore other kinds."""
    items = given if isinstance(given, list) else [given]
    return [
        {"role": item.get("role", "user"), "content": item.get("content", "")}
        for item in items
        if isinstance(item, dict) and ("role" in item or "content" in item)
    ]
