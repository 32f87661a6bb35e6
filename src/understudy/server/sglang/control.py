"""SGLang's control routes: flush the cache, abort requests, pause and continue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from understudy.server.api.developer import Later, PlainReply
from understudy.server.api.errors import ApiError, Problem, invalid_body
from understudy.server.api.fields import read_any

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Request
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
NOT_FLUSHED = "Flush cache failed.\n"
TIMED_OUT = "Timed out waiting for idle state."
_POLLED_EVERY_S = 0.01
_MODES = ("abort", "in_place")


class Control:
    """Answers the control routes of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.plain: dict[str, dict[str, Plain]] = {
            "/flush_cache": {"GET": self._flush, "POST": self._flush},
            "/abort_request": {"POST": self._abort},
            "/pause_generation": {"POST": self._pause},
            "/continue_generation": {"POST": self._continue},
        }

    # ── The cache ──

    def _flush(self, request: Request, query: dict[str, str]) -> tuple[int, Any]:  # noqa: ARG002
        """Clear the cache if the engine is idle, else wait for that for `timeout` seconds (default: 0)."""
        try:
            left_s = float(query.get("timeout", "0"))
        except ValueError:
            left_s = -1.0
        if not 0 <= left_s < float("inf"):
            raise invalid_body([Problem("greater_than_equal", "query.timeout", "must be 0 or more")])
        failure = TIMED_OUT if left_s > 0 else NOT_FLUSHED
        return 200, Later(lambda reply: self._flush_when_idle(left_s, failure, reply))

    def _flush_when_idle(self, left_s: float, failure: str, reply: Callable[[Any], None]) -> None:
        def on_flushed(flushed: bool) -> None:
            if flushed or left_s <= 0:
                reply(PlainReply(200, FLUSHED) if flushed else PlainReply(400, failure))
                return
            asyncio.get_running_loop().call_later(
                _POLLED_EVERY_S, self._flush_when_idle, left_s - _POLLED_EVERY_S, failure, reply
            )

        self._worker.flush(on_flushed)

    # ── Requests ──

    def _abort(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Abort the request with an id, or all; an unknown id has no effect."""
        body = _read_object(request)
        rid, every = body.get("rid") or "", body.get("abort_all", False)
        if not isinstance(rid, str) or not isinstance(every, bool):
            name = "abort_all" if isinstance(rid, str) else "rid"
            raise invalid_body([Problem("type_error", f"body.{name}", "has a wrong type", body.get(name))])
        live = self._worker.live()
        if every:
            self._worker.abort(live)
        elif any(one.name == rid for one in live):  # SGLang's scheduler then takes the id as a prefix
            self._worker.abort([one for one in live if rid and one.name.startswith(rid)])
        return 200, None

    def _pause(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        """Pause: `abort` ends all requests and keeps new ones; `in_place` begins no step."""
        mode = _read_object(request).get("mode", "abort")
        if mode == "retract":
            raise ApiError("mode: retract is not simulated; give abort or in_place", kind="Bad Request")
        if mode not in _MODES:
            message = "Input should be 'abort', 'retract' or 'in_place'"
            raise invalid_body([Problem("literal_error", "body.mode", message, mode)])
        worker = self._worker
        worker.hold_requests()
        if mode == "abort":
            worker.abort(worker.live())
        else:
            for core in worker.cores:
                core.paused = True
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, *_: object) -> tuple[int, Any]:
        """Continue: begin steps again and submit the requests that arrived meanwhile."""
        worker = self._worker
        for core in worker.cores:
            core.paused = False
            worker.driver.enqueue(core, lambda _: None)
        worker.release_requests()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}


def _read_object(request: Request) -> dict[str, Any]:
    body = read_any(request) if request.body else {}
    if not isinstance(body, dict):
        raise invalid_body([Problem("model_attributes_type", "body", "the body must be an object", body)])
    return body
