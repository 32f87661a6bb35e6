"""Routes of vLLM's developer mode: caches, sleep, pauses, weights, calls into its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from understudy.server.api.errors import ApiError, Problem, bad_request, invalid_body
from understudy.server.api.fields import Fields, read_json, read_object
from understudy.server.api.schema import Shape
from understudy.server.api.type_checks import check_types

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Request
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]

_TRUE = ("true", "1", "yes", "on", "t", "y")
_FALSE = ("false", "0", "no", "off", "f", "n")
_ACTIONS = ("checksum", "reset", "compare")


class Later(NamedTuple):
    """A reply that is sent later."""

    start: Callable[[Callable[[Any], None]], None]
    """Start the operation; it calls its argument with the reply."""


class PlainReply(NamedTuple):
    """A later reply of plain text, with its own status."""

    status: int
    text: str


class Developer:
    """Answers the developer routes of one worker. There are no weights: an update changes only their version."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.plain: dict[str, dict[str, Plain]] = {
            "/reset_prefix_cache": {"POST": self._reset},
            "/reset_mm_cache": {"POST": self._nothing},
            "/reset_encoder_cache": {"POST": self._nothing},
            "/collective_rpc": {"POST": self._call},
            "/server_info": {"GET": self._info},
            "/sleep": {"POST": self._sleep},
            "/release_kv_cache_memory": {"POST": self._release},
            "/wake_up": {"POST": self._wake},
            "/is_sleeping": {"GET": lambda *_: (200, {"is_sleeping": worker.pauses.asleep})},
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/abort_requests": {"POST": self._abort},
            "/is_paused": {"GET": lambda *_: (200, {"is_paused": worker.pauses.paused})},
            "/init_weight_transfer_engine": {"POST": self._init_transfer},
            "/shutdown_weight_transfer_engine": {"POST": _make_reply("Weight transfer shut down")},
            "/start_weight_update": {"POST": _make_reply("Weight update started")},
            "/start_draft_weight_update": {"POST": _make_reply("Draft weight update started")},
            "/update_weights": {"POST": self._update_weights},
            "/finish_weight_update": {"POST": self._finish_update},
            "/update_weight_version": {"POST": self._set_version},
            "/weight_info": {"GET": lambda *_: (200, {"weight_version": self._worker.weight_version})},
            "/weight_checker": {"POST": self._check_weights},
            "/get_world_size": {"GET": self._world_size},
        }

    def _nothing(self, *_: object) -> tuple[int, None]:
        return 200, None

    # ── Caches, sleep, pauses ──

    def _reset(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        for name in ("reset_running_requests", "reset_external"):
            _flag(query, name, default=False)
        return 200, {"success": self._worker.reset_prefix_cache()}

    def _sleep(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        level = query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise invalid_body([Problem("int_parsing", "query.level", "must be 0, 1 or 2", level)])
        mode, sleep = _mode(query), self._worker.pauses.sleep

        def begin(answer: Callable[[Any], None]) -> None:
            def then(asleep: bool) -> None:
                answer({"status": "sleeping" if asleep else "awake", "level": int(level)})

            sleep(int(level), mode, then=then)

        return 200, Later(begin)

    def _wake(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        tags = parse_qs(request.query).get("tags")
        awake = self._worker.pauses.wake(tags)
        return 200, {"status": "awake" if awake else "sleeping", "tags": tags}

    def _release(self, *_: object) -> tuple[int, Any]:
        self._worker.pauses.release_cache()
        return 200, {"status": "kv_cache_released"}

    def _pause(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        mode, clear_cache = _mode(query), _flag(query, "clear_cache", default=True)
        pauses = self._worker.pauses

        def begin(answer: Callable[[Any], None]) -> None:
            pauses.rejects = mode != "keep" and self._worker.release.rejects_while_paused
            pauses.pause(mode, clear_cache=clear_cache, then=lambda: answer({"status": "paused"}))

        return 200, Later(begin)

    def _resume(self, *_: object) -> tuple[int, Any]:
        self._worker.pauses.resume()
        return 200, {"status": "resumed"}

    def _abort(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Abort the named requests, or all."""
        named = read_object(request).get("request_ids")
        live = self._worker.live()
        if not named:
            self._worker.abort(live)
            return 200, {"status": "aborted", "aborted": len(live)}
        if not isinstance(named, list | str):
            raise bad_request("request_ids must be a list")
        abort(self._worker, named)
        return 200, {"status": "aborted", "aborted": len(named)}

    # ── Introspection ──

    def _info(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        form = query.get("config_format", "text")
        if form not in ("text", "json"):
            raise invalid_body(
                [Problem("literal_error", "query.config_format", "must be text or json", form)]
            )
        described = msgspec.to_builtins(self._worker.settings)
        described.pop("api_keys", None)  # secret
        shown: Any = described if form == "json" else str(described)
        return 200, {"vllm_config": shown, "vllm_env": {}, "system_env": {}}

    def _world_size(self, _: Request, query: dict[str, str]) -> tuple[int, Any]:
        with_ranks = _flag(query, "include_dp", default=True)
        return 200, {"world_size": len(self._worker.cores) if with_ranks else 1}

    def _call(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Answer null for every rank: there are no vLLM workers to call."""
        body = read_object(request)
        if body.get("method") is None:
            raise bad_request("the body names no method")
        if not isinstance(body.get("args", []), str | list | dict):
            raise ApiError("args must be a list")
        return 200, {"results": [None for _ in self._worker.cores]}

    # ── Weights ──

    def _init_transfer(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        _read(request, {"init_info": Shape("object", null=False, required=True)})
        return 200, {"message": "Weight transfer initialized"}

    def _update_weights(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = _read(request, {"update_info": Shape("any", null=False, required=True)})
        given = fields.raw("update_info")
        if not isinstance(given, dict | list) or (
            isinstance(given, list) and not all(isinstance(one, dict) for one in given)
        ):
            fields.note("dict_type", "update_info", "must be an object or a list of them", given)
            fields.done()
        return 200, {"message": "Weights updated"}

    def _finish_update(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        if request.body:
            fields = _read(request, {"weight_version": Shape("str")})
            self._worker.weight_version = fields.text("weight_version") or self._worker.weight_version
        return 200, {"message": "Weight update finished"}

    def _set_version(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = _read(request, {"new_version": Shape("str", null=False, required=True)})
        self._worker.weight_version = fields.text("new_version") or ""
        return 200, {"success": True, "new_version": self._worker.weight_version}

    def _check_weights(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        schema = {
            "action": Shape("str", null=False, required=True, choices=_ACTIONS),
            "baseline": Shape("object"),
        }
        fields = _read(request, schema)
        action, baseline = fields.text("action"), fields.object("baseline")
        if action == "reset":
            return 200, {"status": "reset"}
        if action == "checksum":
            return 200, {"checksums": {}}
        if baseline is None:
            raise bad_request("to compare needs a baseline")
        return 200, {"match": not baseline, "mismatches": sorted(baseline)}


def abort(worker: Worker, names: list[Any] | str) -> None:
    """Abort the requests of these names (a completion's with its prompt index); ignore unknown names."""
    wanted = {names} if isinstance(names, str) else {name for name in names if isinstance(name, str)}
    worker.abort([one for one in worker.live() if one.name in wanted or f"{one.name}-0" in wanted])


def _make_reply(message: str) -> Plain:
    return lambda *_: (200, {"message": message})


def _read(request: Request, schema: dict[str, Shape]) -> Fields:
    """Read embedded fields from a body of any form. ApiError names the missing ones."""
    body = read_json(request) if request.body else None
    fields = Fields(body if isinstance(body, dict) else {})
    if body is not None and not isinstance(body, dict):
        for name in schema:
            fields.note("missing", name, "must be given")
            break
    else:
        check_types(fields, schema)
    fields.done()
    return fields


def _mode(query: dict[str, str]) -> str:
    mode = query.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise invalid_body([Problem("literal_error", "query.mode", "must be abort, wait or keep", mode)])
    return mode


def _flag(query: dict[str, str], name: str, *, default: bool) -> bool:
    given = query.get(name, str(default)).lower()
    if given not in (*_TRUE, *_FALSE):
        raise invalid_body([Problem("bool_parsing", f"query.{name}", "must be true or false", query[name])])
    return given in _TRUE
