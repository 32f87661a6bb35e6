"""Paths and what answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.server.api.errors import ApiError, bad_value, no_such_model
from understudy.server.api.fields import Fields, read_body
from understudy.server.api.prompts import read_messages
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
        given = body.get("input")
        if given is None:
            fields = Fields(body)
            fields.note("missing", "input", "must be given")
            fields.done()
        messages: list[Any] = []
        if isinstance(body.get("instructions"), str):
            messages.append({"role": "system", "content": body["instructions"]})
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else _listed(given)
        chat = {
            **{name: value for name, value in body.items() if name not in ("input", "tools", "text")},
            "messages": messages,
            "max_completion_tokens": body.get("max_output_tokens"),
        }
        self._endpoints.chat(chat, request, connection, ResponsesStyle(body), "resp_")

    def _messages(self, body: dict[str, Any], request: Request, connection: Connection) -> None:
        fields = Fields(body)
        if fields.integer("max_tokens") is None:
            fields.note("missing", "max_tokens", "must be given")
        fields.done()
        chat = {**body, "messages": _anthropic(body), "stop": body.get("stop_sequences")}
        chat.pop("tools", None)
        self._endpoints.chat(chat, request, connection, MessagesStyle())

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
                "permission": [],
            }

        cards = [card(name, settings.model, None, settings.max_model_len) for name in settings.names]
        cards += [card(lora.name, lora.path, settings.names[0], None) for lora in worker.loras.values()]
        return 200, {"object": "list", "data": cards}

    def _event_sources(self, *_: object) -> tuple[int, Any]:
        return 200, {str(rank): sender.described() for rank, sender in enumerate(self._worker.senders)}

    def _tokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        worker = self._worker
        fields = Fields(read_body(request))
        self._known_model(fields)
        show = fields.boolean("return_token_strs")
        if fields.has("messages"):
            messages = read_messages(fields, "messages", worker.settings.names[0])
            fields.done()
            text = worker.tokenizer.render_chat(
                messages, add_generation_prompt=fields.boolean("add_generation_prompt", True)
            )
        else:
            text = fields.text("prompt") or ""
            if fields.raw("prompt") is None:
                fields.note("missing", "prompt", "must be given")
            fields.done()
        ids = worker.tokenizer.encode(text)
        strings = [worker.tokenizer.decode([token], skip_special=False) for token in ids] if show else None
        length = worker.settings.max_model_len
        return 200, {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    def _detokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        self._known_model(fields)
        tokens = fields.integers("tokens")
        if fields.raw("tokens") is None:
            fields.note("missing", "tokens", "must be given")
        for place, token in enumerate(tokens):
            if token < 0:
                fields.note("greater_than_equal", f"tokens.{place}", "a token id is not negative", token)
                break
        fields.done()
        known = [token for token in tokens if token < self._worker.tokenizer.vocabulary]
        return 200, {"prompt": self._worker.tokenizer.decode(known, skip_special=False)}

    def _known_model(self, fields: Fields) -> None:
        name, worker = fields.text("model"), self._worker
        if name and name not in worker.settings.names and name not in worker.loras:
            raise no_such_model(name, (*worker.settings.names, *worker.loras))

    def _count_tokens(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        fields = Fields({**body, "messages": _anthropic(body)})
        messages = read_messages(fields, "messages", self._worker.settings.names[0])
        fields.done()
        text = self._worker.tokenizer.render_chat(messages)
        return 200, {"input_tokens": len(self._worker.tokenizer.encode(text))}

    def _scale_out(self, *_: object) -> tuple[int, Any]:
        raise ApiError("this endpoint needs --enable-scale-out", status=403, kind="PermissionDeniedError")

    # ── For developers ──

    def _reset(self, *_: object) -> tuple[int, Any]:
        return 200, {"success": self._worker.reset_prefix_cache()}

    def _sleep(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise bad_value("level must be 0, 1 or 2", "level", level)
        self._worker.sleep(int(level))
        return 200, None

    def _wake(self, *_: object) -> tuple[int, Any]:
        self._worker.wake()
        return 200, None

    def _pause(self, *_: object) -> tuple[int, Any]:
        for core in self._worker.cores:
            self._worker.set_paused(core, True)
        return 200, {"status": "paused"}

    def _resume(self, *_: object) -> tuple[int, Any]:
        for core in self._worker.cores:
            self._worker.set_paused(core, False)
        return 200, {"status": "resumed"}

    def _abort(self, *_: object) -> tuple[int, Any]:
        live = self._worker.live()
        for request in live:
            self._worker.driver.cancel(request)
        return 200, {"aborted": len(live)}

    def _info(self, *_: object) -> tuple[int, Any]:
        import msgspec

        described = msgspec.to_builtins(self._worker.settings)
        described.pop("api_keys", None)  # nobody's business
        return 200, {"vllm_config": described, "vllm_env": {}, "system_env": {}}

    def _load_lora(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        name, path = fields.text("lora_name"), fields.text("lora_path")
        replace = fields.boolean("load_inplace")
        fields.done()
        if not name or not path:
            raise ApiError("lora_name and lora_path must both be given", kind="InvalidUserInput")
        if name in self._worker.loras and not replace:
            raise ApiError(f"an adapter {name!r} is loaded already", kind="InvalidUserInput")
        self._worker.loras[name] = LoraModule(name, path)
        return 200, f"Success: adapter {name!r} is loaded."

    def _unload_lora(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        name = fields.text("lora_name")
        fields.done()
        if not name:
            raise ApiError("lora_name must be given", kind="InvalidUserInput")
        if name not in self._worker.loras:
            raise ApiError(f"no adapter {name!r} is loaded", status=404, kind="NotFoundError")
        del self._worker.loras[name]
        return 200, f"Success: adapter {name!r} is unloaded."


def _listed(given: Any) -> list[Any]:
    """Input items of a response as messages; those of another kind say nothing."""
    items = given if isinstance(given, list) else [given]
    return [
        {"role": item.get("role", "user"), "content": item.get("content", "")}
        for item in items
        if isinstance(item, dict) and ("role" in item or "content" in item)
    ]


def _anthropic(body: dict[str, Any]) -> Any:
    messages = body.get("messages")
    system = body.get("system")
    if system is None or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *messages]
