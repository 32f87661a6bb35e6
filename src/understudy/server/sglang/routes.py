"""Routes of SGLang's API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.server.access import RouteClass, route_class
from understudy.server.api.errors import ApiError, Problem, invalid_body
from understudy.server.api.fields import Fields, read_any, read_body
from understudy.server.api.prompts import chat_text, read_messages
from understudy.server.live_request import LiveRequest
from understudy.server.sglang.control import Control
from understudy.server.sglang.errors import GENERATE
from understudy.server.sglang.info import describe_card, describe_loads, list_models, model_info, server_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Connection, Request
    from understudy.server.sglang.endpoints import SglangEndpoints
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]
    Generator = Callable[[dict[str, Any], Request, Connection], object]

_PUBLIC_PREFIXES = ("/health", "/ready", "/metrics")
_KEYED = frozenset(
    (
        *(GENERATE, "/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load"),
        *("/tokenize", "/detokenize", "/ping", "/kv_event_sources"),
    )
)


def sglang_route_class(path: str) -> RouteClass:
    """Classify a path: SGLang's key protects all routes but health and metrics."""
    if path.startswith(_PUBLIC_PREFIXES):
        return RouteClass.PUBLIC
    return RouteClass.KEYED if path in _KEYED else route_class(path)


class SglangRoutes:
    """Tables of routes, as `api.routes.Routes` has them."""

    adapters = None

    def __init__(self, worker: Worker, endpoints: SglangEndpoints) -> None:
        self._worker = worker
        self.generators: dict[str, Generator] = {
            GENERATE: endpoints.generate,
            "/v1/completions": endpoints.completions,
            "/v1/chat/completions": endpoints.chat,
        }
        self.plain: dict[str, dict[str, Plain]] = {
            "/ready": {"GET": self._nothing},
            "/ping": {"GET": self._nothing},
            "/v1/models": {"GET": lambda *_: (200, list_models(worker))},
            "/model_info": {"GET": lambda *_: (200, model_info(worker))},
            "/get_model_info": {"GET": lambda *_: (200, model_info(worker))},
            "/server_info": {"GET": lambda *_: (200, server_info(worker))},
            "/get_server_info": {"GET": lambda *_: (200, server_info(worker))},
            "/v1/loads": {"GET": lambda *_: (200, describe_loads(worker))},
            "/kv_event_sources": {"GET": self._event_sources},
            "/tokenize": {"POST": self._tokenize},
            "/v1/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/detokenize": {"POST": self._detokenize},
        }
        for name in worker.settings.names:
            card = partial(describe_card, worker, name)
            self.plain[f"/v1/models/{name}"] = {"GET": lambda *_, card=card: (200, card())}
        self.plain |= Control(worker).plain

    def read(self, request: Request) -> dict[str, Any]:
        """Read the body of a generation request. ApiError when it is invalid."""
        if request.path != GENERATE:
            return read_body(request)
        body = read_any(request)
        if not isinstance(body, dict):
            raise invalid_body(
                [Problem("model_attributes_type", "body", "the body must be an object", body)], param=False
            )
        return body

    def methods_of(self, path: str) -> tuple[str, ...]:
        """List the methods that a path accepts."""
        if path == GENERATE:
            return ("POST", "PUT")
        return ("POST",) if path in self.generators else tuple(self.plain.get(path, {}))

    def _nothing(self, *_: object) -> tuple[int, None]:
        return 200, None

    def _event_sources(self, *_: object) -> tuple[int, Any]:
        """Describe the publishers of KV events, for `understudy router`; SGLang has no such route."""
        return 200, {str(rank): sender.describe() for rank, sender in enumerate(self._worker.senders)}

    def _tokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        if (fields.raw("prompt") is None) == (fields.raw("messages") is None):
            fields.note("value_error", "prompt", "Exactly one of 'prompt' or 'messages' must be provided.")
        if fields.raw("messages") is None:
            prompts = fields.texts("prompt")
        else:
            messages = read_messages(fields, "messages", self._worker.settings.names[0])
            fields.done()
            prompts = [chat_text(fields, messages, self._worker.tokenizer, trusted=False)]
        fields.done()
        ids = [self._worker.tokenizer.encode(prompt) for prompt in prompts]
        counts = [len(one) for one in ids]
        single = not isinstance(fields.raw("prompt"), list)
        length = self._worker.settings.max_model_len
        if single:
            return 200, {"tokens": ids[0], "count": counts[0], "max_model_len": length}
        return 200, {"tokens": ids, "count": counts, "max_model_len": length}

    def _detokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        body = read_body(request)
        tokens: Any = body.get("tokens")
        rows: list[Any] = (
            tokens if isinstance(tokens, list) and tokens and isinstance(tokens[0], list) else [tokens]
        )
        for row in rows:
            if not isinstance(row, list) or not all(type(one) is int and one >= 0 for one in row):
                raise invalid_body([Problem("list_type", "body.tokens", "must be token ids", row)])
        vocabulary = self._worker.tokenizer.vocabulary
        keep = body.get("skip_special_tokens", True) is not False
        texts = [
            self._worker.tokenizer.decode([one for one in row if one < vocabulary], skip_special=keep)
            for row in rows
        ]
        return 200, {"text": texts[0] if rows[0] is tokens else texts}


class HealthRequest:
    """A request of one token: its end proves that the engine computes."""

    def __init__(self, then: Callable[[bool], None]) -> None:
        self._then = then

    def on_admitted(self, request: LiveRequest, now_ns: int) -> None:
        """Do nothing: such a request is not counted."""

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Do nothing: its token is not sent."""

    def on_end(self, request: LiveRequest, now_ns: int) -> None:  # noqa: ARG002
        """Report whether the request was computed."""
        self._then(request.ended == "finished")

    def on_error(self, request: LiveRequest) -> None:  # noqa: ARG002
        """Report a failure."""
        self._then(False)


def check_by_generating(worker: Worker, then: Callable[[bool], None]) -> None:
    """Compute one token on an idle rank and call `then`; with requests on every rank, call it at once."""
    idle = [rank for rank, core in enumerate(worker.cores) if not core.live and not core.paused]
    if not idle:
        then(not worker.failed)
        return
    token = np.zeros(1, dtype=np.uint32)
    identities = worker.identities(token, token, idle[0], salt="", lora="")
    request = LiveRequest(f"HEALTH_CHECK_{worker.index}", 1, 1, identities, HealthRequest(then))
    try:
        worker.driver.submit(worker.cores[idle[0]], request)
    except Exception as error:
        raise ApiError(str(error), status=503, kind="503") from error
