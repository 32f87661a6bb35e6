"""Two-stage routing of a fleet with prefill and decode workers: a prompt on one, its answer from another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import msgspec

from understudy.errors import PolicyError, WrongState
from understudy.http.outbox import Answer
from understudy.server.api.errors import ApiError, error_body
from understudy.server.api.fields import read_body
from understudy.server.api.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.fleets.routing import FleetRouting
    from understudy.http import Connection, Request
    from understudy.router.dispatch import Decision, LiveRouteRequest
    from understudy.run.disaggregation import Disaggregation
    from understudy.server.metrics.families import Histogram
    from understudy.server.server import Server

PATHS = ("/v1/completions", "/v1/chat/completions")
"""Routes whose bodies have `kv_transfer_params`; requests of others stay on a decode worker."""
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class StagedForward:
    """Sends a request's prompt to a prefill worker and the request itself, with the answer, to a decode worker."""

    def __init__(
        self,
        servers: list[Server],
        settings: Disaggregation,
        prefill: FleetRouting,
        decode: FleetRouting,
        on_sent: Callable[[LiveRouteRequest, Decision, int, str], None],
    ) -> None:
        self._servers = servers
        self._decider = settings.decider()
        self.decode_first = settings.order == "decode_first" or self._decider.reads_cache
        """True when the decode worker is chosen on arrival."""
        self.prefill = prefill
        self.decode = decode
        self._on_sent = on_sent
        self.ways = {"remote": 0, "local": 0}
        """Number of requests by the worker that computed their prompt."""
        self.first_token: Histogram | None = None
        """Times to first token as clients see them, over both stages."""

    def forward(self, request: Request, connection: Connection, asked: LiveRouteRequest) -> None:
        """Answer a request."""
        _Passage(self, request, connection, asked).begin()

    def decides_remote(self, asked: LiveRouteRequest, worker: int | None) -> bool:
        """Apply the rule. `worker`: the decode worker, if it is chosen."""
        cached = 0
        if worker is not None and len(asked.prompt_blocks):
            core = self._servers[worker].worker.cores[0]
            full = max(asked.prompt_tokens - 1, 0) // core.block_size
            cached = core.engine.cached_prefix(asked.prompt_blocks[:full]) * core.block_size
        return self._decider.remote(asked.prompt_tokens, cached, asked.session or 0)

    def dispatch(
        self, routing: FleetRouting, asked: LiveRouteRequest, go: Callable[[int, Decision], None]
    ) -> None:
        """Choose a worker of one stage, now or when its router releases the request."""
        routing.update_availability()

        def chosen(decision: Decision) -> None:
            worker, _ = routing.targets[decision.worker]
            go(worker, decision)

        routing.dispatcher.dispatch(asked, chosen)

    @property
    def wants_blocks(self) -> bool:
        """True when a router or the rule reads the blocks of a prompt."""
        routers = (self.prefill.dispatcher, self.decode.dispatcher)
        return self._decider.reads_cache or any(router.wants_blocks for router in routers)

    def send(
        self, asked: LiveRouteRequest, decision: Decision, worker: int, request: Request, answer: Answer
    ) -> None:
        """Give a request to a worker."""
        self._on_sent(asked, decision, worker, request.path)
        self._servers[worker].app.handle(request, cast("Connection", answer))

    def observe_first_token(self, arrival_ns: int) -> None:
        """Count the time to first token of a request."""
        if self.first_token is not None:
            self.first_token.observe((self._servers[0].runtime.clock.now_ns() - arrival_ns) / 1e9)

    def outbox(self) -> Any:
        """Return the outbox that the workers share."""
        return self._servers[0].runtime.outbox


class _Passage:
    """The way of one request through both stages."""

    def __init__(
        self, stages: StagedForward, request: Request, connection: Connection, asked: LiveRouteRequest
    ) -> None:
        self._stages = stages
        self._request = request
        self._connection = connection
        self._asked = asked
        self._on_answered = connection.on_answered
        self._on_ended = connection.on_ended
        self._decode: tuple[int, Decision] | None = None
        self._leg: PrefillAnswer | None = None
        self._decode_asked = asked
        self._params: Any = None

    def begin(self) -> None:
        connection, stages = self._connection, self._stages
        connection.on_close = self._client_gone
        if stages.decode_first or not self._divisible():
            self._choose(stages.decode, "decode", self._on_decode_chosen)
        elif stages.decides_remote(self._asked, None):
            self._choose(stages.prefill, "prefill", self._send_prefill)
        else:
            self._choose(stages.decode, "decode", self._send_local)

    def _divisible(self) -> bool:
        """Return True if one answer to one prompt is asked for, on a route that can hand it over."""
        if self._request.path not in PATHS:
            return False
        try:
            body = read_body(self._request)
        except ApiError:  # the decode worker answers with the error
            return False
        prompt = body.get("prompt")
        several = (
            isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(t, int) for t in prompt)
        )
        one = body.get("n", 1) in (1, None) and not several and not body.get("kv_transfer_params")
        return one and _has_valid_limits(body)

    def _choose(self, routing: FleetRouting, stage: str, go: Callable[[int, Decision], None]) -> None:
        asked = self._asked._replace(row=routing.dispatcher.next_row(), stage=stage)
        connection = self._connection

        def chosen(worker: int, decision: Decision) -> None:
            if connection.closed:
                routing.dispatcher.ended(asked.row)
            else:
                self._asked = asked
                go(worker, decision)

        try:
            self._stages.dispatch(routing, asked, chosen)
        except WrongState:
            self._fail(503, f"no {stage} worker is available", "ServiceUnavailableError")
        except PolicyError as error:
            self._fail(500, str(error), "InternalServerError")

    # ── Stages ──

    def _on_decode_chosen(self, worker: int, decision: Decision) -> None:
        if not self._divisible() or not self._stages.decides_remote(self._asked, worker):
            self._send_local(worker, decision)
            return
        self._decode = (worker, decision)
        self._decode_asked = self._asked
        self._choose(self._stages.prefill, "prefill", self._send_prefill)

    def _send_local(self, worker: int, decision: Decision) -> None:
        self._stages.ways["local"] += 1
        self._send_decode(worker, decision, self._request)

    def _send_prefill(self, worker: int, decision: Decision) -> None:
        self._stages.ways["remote"] += 1
        asked, dispatcher = self._asked, self._stages.prefill.dispatcher
        body = dict(read_body(self._request))
        body.pop("stream_options", None)
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}
        for name in ("max_completion_tokens", "min_tokens"):
            if body.get(name) is not None:
                body[name] = 1
        self._request.headers.setdefault("x-request-id", new_id())
        leg = PrefillAnswer(self._stages.outbox(), self._connection, self._on_prefilled)
        leg.on_first_token = lambda: dispatcher.first_token(asked.row)
        leg.on_ended = lambda: dispatcher.ended(asked.row)
        self._leg = leg
        self._stages.send(asked, decision, worker, self._with_body(body), leg)

    def _on_prefilled(self, status: int, body: bytes) -> None:
        """Go on to the decode worker with the prefill worker's answer."""
        self._leg = None
        if self._connection.closed:
            return
        if status != 200:
            self._drop_decode()
            self._connection.on_close = None
            self._connection.respond(status, body)
            return
        params = msgspec.json.decode(body).get("kv_transfer_params")
        self._params = params
        if self._decode is None:
            self._choose(self._stages.decode, "decode", self._send_remote)
        else:
            self._asked = self._decode_asked
            decode, self._decode = self._decode, None
            self._send_remote(*decode)

    def _send_remote(self, worker: int, decision: Decision) -> None:
        body = {**read_body(self._request), "kv_transfer_params": self._params}
        self._send_decode(worker, decision, self._with_body(body))

    def _send_decode(self, worker: int, decision: Decision, request: Request) -> None:
        asked, dispatcher, connection = self._asked, self._stages.decode.dispatcher, self._connection
        self._decode = None
        connection.on_answered = self._on_answered
        connection.on_first_token = lambda: self._on_first_token(asked.row)
        on_ended = self._on_ended

        def ended() -> None:
            dispatcher.ended(asked.row)
            if on_ended is not None:
                on_ended()

        connection.on_ended = ended
        self._stages.send(asked, decision, worker, request, connection)
        connection.extra_headers += f"x-understudy-worker: {worker}\r\n".encode()

    def _on_first_token(self, row: int) -> None:
        self._stages.decode.dispatcher.first_token(row)
        self._stages.observe_first_token(self._asked.arrival_ns)

    def _with_body(self, body: dict[str, Any]) -> Request:
        return self._request.with_body(msgspec.json.encode(body))

    # ── Ends ──

    def _client_gone(self) -> None:
        self._drop_decode()
        if self._leg is not None:
            self._leg.abandon()

    def _drop_decode(self) -> None:
        """Give back the decode worker that was chosen and is not needed."""
        if self._decode is not None:
            self._decode = None
            self._stages.decode.dispatcher.ended(self._decode_asked.row)

    def _fail(self, status: int, why: str, kind: str) -> None:
        self._drop_decode()
        self._connection.on_close = None
        self._connection.respond(status, error_body(status, why, kind))


def _has_valid_limits(body: dict[str, Any]) -> bool:
    """Return True unless a worker refuses the fields that a prefill worker gets other values of."""
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens", "min_tokens")]
    if not all(limit is None or (type(limit) is int and limit >= 0) for limit in limits):
        return False
    if 0 in limits[:2] or (limits[2] or 0) > min((limit for limit in limits[:2] if limit), default=math.inf):
        return False
    stream = body.get("stream")
    return type(stream) in (bool, type(None)) and (bool(stream) or body.get("stream_options") is None)


class PrefillAnswer(Answer):
    """Takes the answer of a prefill worker in place of a client's connection."""

    def __init__(self, outbox: Any, client: Connection, on_done: Callable[[int, bytes], None]) -> None:
        super().__init__(outbox)
        self._client = client
        self._on_done = on_done
        self._gone = False
        self._answering = True

    @property
    def peer(self) -> str | None:
        """The client's address."""
        return self._client.peer

    @property
    def closed(self) -> bool:
        """True when the client has disconnected."""
        return self._gone

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",  # noqa: ARG002
        headers: bytes = b"",  # noqa: ARG002
        *,
        length: int | None = None,  # noqa: ARG002
    ) -> None:
        """Take a whole answer."""
        if self._gone or not self._answering:
            return
        self._status, self._sent_bytes = status, len(body)
        self._answering = False
        self.on_close = None
        self._notify_ended()
        self._on_done(status, body)

    def drop(self) -> None:
        """Report a connection that a fault has cut."""
        self.respond(502, error_body(502, "the prefill worker has cut the connection", "BadGateway"))

    def abandon(self) -> None:
        """End the prompt, because the client has disconnected."""
        self._gone = True
        if self._answering:
            self._close_answer()

    def _read_on(self) -> None:
        """Read nothing: a prefill worker gets one request."""
