"""Paths and what answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from understudy.server.api.anthropic import check_anthropic, in_anthropics_words, messages_of, tools_of
from understudy.server.api.before import check_salt
from understudy.server.api.errors import ApiError, Problem, bad_value, invalid_body, no_such_model
from understudy.server.api.fields import Fields, read_body, read_json
from understudy.server.api.generation import new_id
from understudy.server.api.prompts import chat_text, read_messages, tokens_of
from understudy.server.api.sampling import Sampling
from understudy.server.api.schema import (
    COUNT,
    DETOKENIZE,
    LOAD_LORA,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    TOKENIZE_CHAT,
    UNLOAD_LORA,
    check_types,
)
from understudy.server.api.styles import MessagesStyle, ResponsesStyle
from understudy.server.settings import VERSION, LoraModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.api.endpoints import Endpoints
    from understudy.server.http import Connection, Request
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]
    Generator = Callable[[dict[str, Any], Request, Connection], object]


class Routes:
    """`generators` answer when the engine has; `plain` ones at once, with a status and a reply."""

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
            "/version": {"GET": lambda *_: (200, {"version": VERSION})},
            "/v1/models": {"GET": self._models},
            "/kv_event_sources": {"GET": self._event_sources},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/systemone": {"POST": self._systemone},
            "/is_scaling_elastic_ep": {"POST": lambda *_: (200, {"is_scaling_elastic_ep": False})},
        }
        closed: dict[str, Plain] = {"POST": self._scale_out}
        for path in (
            "/v1/completions/render",
            "/v1/chat/completions/render",
            "/v1/completions/derender",
            "/v1/chat/completions/derender",
            "/inference/v1/generate",
        ):
            self.plain[path] = closed
        if settings.dev_mode:
            self._add_dev()
        if settings.runtime_lora:
            self.plain["/v1/load_lora_adapter"] = {"POST": self._load_lora}
            self.plain["/v1/unload_lora_adapter"] = {"POST": self._unload_lora}

    def _add_dev(self) -> None:
        worker = self._worker
        self.plain |= {
            "/reset_prefix_cache": {"POST": self._reset},
            "/reset_mm_cache": {"POST": self._nothing},
            "/reset_encoder_cache": {"POST": self._nothing},
            "/sleep": {"POST": self._sleep},
            "/release_kv_cache_memory": {"POST": self._release},
            "/get_world_size": {"GET": self._world_size},
            "/wake_up": {"POST": self._wake},
            "/is_sleeping": {"GET": lambda *_: (200, {"is_sleeping": worker.asleep})},
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/is_paused": {"GET": lambda *_: (200, {"is_paused": any(core.paused for core in worker.cores)})},
            "/abort_requests": {"POST": self._abort},
            "/server_info": {"GET": self._info},
        }

    # ── Generators in other words ──

    def _invocations(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        answer = self._endpoints.chat if "messages" in body else self._endpoints.completions
        answer(body, request, connection)

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
        check_types(fields, RESPONSES)
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
        }
        try:
            self._endpoints.chat(chat, request, connection, ResponsesStyle(body), "resp_")
        except ApiError as error:  # what was translated is told in the words of who asked
            if error.param == "max_completion_tokens":
                raise ApiError(
                    str(error).replace(error.param, "max_output_tokens"), param="max_output_tokens"
                ) from None
            raise

    def _messages(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        check_anthropic(body, MESSAGES)
        names = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "vllm_xargs")
        chat = {name: body[name] for name in names if body.get(name) is not None}
        chat |= {"messages": messages_of(body), "stop": body.get("stop_sequences"), **tools_of(body)}
        try:
            self._endpoints.chat(chat, request, connection, MessagesStyle())
        except ApiError as error:
            raise in_anthropics_words(error) from None

    # ── Answers at once ──

    def _nothing(self, *_: object) -> tuple[int, None]:
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
        return 200, {str(rank): sender.described() for rank, sender in enumerate(self._worker.senders)}

    def _tokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        worker = self._worker
        body = read_body(request)
        fields = Fields(body)
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise ApiError("continue_final_message and add_generation_prompt exclude each other")
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
        ids = worker.tokenizer.encode(text)
        strings = [worker.tokenizer.decode([token], skip_special=False) for token in ids] if show else None
        length = worker.settings.max_model_len
        return 200, {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    def _detokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
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
        fields = Fields({**body, "messages": messages_of(body)})
        worker = self._worker
        try:
            self._known_model(fields)
            messages = read_messages(fields, "messages", worker.settings.names[0])
            fields.done()
            self._endpoints.check_tools(Fields(tools_of(body)))
            text = chat_text(fields, messages, worker.tokenizer, trusted=False)
            count = len(tokens_of(text, Sampling(), worker.tokenizer, worker.settings.max_model_len))
        except ApiError as error:
            raise in_anthropics_words(error) from None
        return 200, {"input_tokens": count, "context_management": {"original_input_tokens": count}}

    def _systemone(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Decisions of a model that was made for them, which no model here is."""
        fields = Fields(read_body(request))
        for name in ("state", "questions"):
            if fields.raw(name) is None:
                fields.note("missing", name, "must be given")
        fields.done()
        raise ApiError("this model makes no structured decisions")

    def _scale_out(self, *_: object) -> tuple[int, Any]:
        raise ApiError("this endpoint needs --enable-scale-out", status=403, kind="PermissionDeniedError")

    # ── For developers ──

    def _reset(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        for name in ("reset_running_requests", "reset_external"):
            if query.get(name, "false").lower() not in _BOOLEANS:
                problem = Problem("bool_parsing", f"query.{name}", "must be true or false", query[name])
                raise invalid_body([problem])
        return 200, {"success": self._worker.reset_prefix_cache()}

    def _sleep(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise invalid_body([Problem("int_parsing", "query.level", "must be 0, 1 or 2", level)])
        _check_mode(query)
        self._worker.sleep(int(level))
        return 200, {"status": "sleeping", "level": int(level)}

    def _wake(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        tags = parse_qs(request.query).get("tags")
        self._worker.wake()
        return 200, {"status": "awake", "tags": tags}

    def _release(self, *_: object) -> tuple[int, Any]:
        self._worker.release_cache()
        return 200, {"status": "kv_cache_released"}

    def _world_size(self, *_: object) -> tuple[int, Any]:
        return 200, {"world_size": len(self._worker.cores)}

    def _pause(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        _check_mode(query)
        for core in self._worker.cores:
            self._worker.set_paused(core, True)
        return 200, {"status": "paused"}

    def _resume(self, *_: object) -> tuple[int, Any]:
        for core in self._worker.cores:
            self._worker.set_paused(core, False)
        return 200, {"status": "resumed"}

    def _abort(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Those that are named, or all of them."""
        named = read_json(request.body).get("request_ids") if request.body.startswith(b"{") else None
        live = self._worker.live()
        wanted = live if not isinstance(named, list) else [one for one in live if one.name in named]
        for one in wanted:
            self._worker.driver.cancel(one)
        return 200, {"status": "aborted", "aborted": len(wanted)}

    def _info(self, *_: object) -> tuple[int, Any]:
        import msgspec

        described = msgspec.to_builtins(self._worker.settings)
        described.pop("api_keys", None)  # nobody's business
        return 200, {"vllm_config": described, "vllm_env": {}, "system_env": {}}

    def _load_lora(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        check_types(fields, LOAD_LORA)
        fields.done()
        name, path = fields.text("lora_name"), fields.text("lora_path")
        replace = fields.boolean("load_inplace")
        if not name or not path:
            raise ApiError("lora_name and lora_path must both be given", kind="InvalidUserInput")
        if name in self._worker.loras and not replace:
            raise ApiError(f"an adapter {name!r} is loaded already", kind="InvalidUserInput")
        self._worker.loras[name] = LoraModule(name, path)
        return 200, f"Success: adapter {name!r} is loaded."

    def _unload_lora(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        check_types(fields, UNLOAD_LORA)
        fields.done()
        name = fields.text("lora_name")
        if not name:
            raise ApiError("lora_name must be given", kind="InvalidUserInput")
        if name not in self._worker.loras:
            raise ApiError(f"no adapter {name!r} is loaded", status=404, kind="NotFoundError")
        del self._worker.loras[name]
        return 200, f"Success: adapter {name!r} is unloaded."


_BOOLEANS = ("true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n")
_OF_RESPONSES = (
    *("input", "tools", "tool_choice", "text", "include", "top_logprobs", "background", "store", "metadata"),
    *("reasoning", "previous_response_id", "max_tool_calls", "truncation", "service_tier", "instructions"),
)
"""Fields of a response that a chat does not have, or has in another form."""


def _check_mode(query: dict[str, str]) -> None:
    if query.get("mode", "abort") not in ("abort", "wait", "keep"):
        raise invalid_body(
            [Problem("literal_error", "query.mode", "must be abort, wait or keep", query["mode"])]
        )


def no_such_response(name: str) -> ApiError:
    """Responses are not kept, so that none can be asked for."""
    return ApiError(
        f"There is no response {name!r} here.",
        status=404,
        kind="invalid_request_error",
        param="response_id",
    )


def _permission(created: int) -> dict[str, Any]:
    """As OpenAI's models had it, of which clients may read `allow_sampling`."""
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


def _listed(given: Any) -> list[Any]:
    """Input items of a response as messages; those of another kind say nothing."""
    items = given if isinstance(given, list) else [given]
    return [
        {"role": item.get("role", "user"), "content": item.get("content", "")}
        for item in items
        if isinstance(item, dict) and ("role" in item or "content" in item)
    ]
