"""One server: its routes and how each is answered."""

from __future__ import annotations

import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from understudy.server.access import Access, RouteClass, Unauthorized
from understudy.server.api.adapters import PREFIX
from understudy.server.api.developer import Later, PlainReply
from understudy.server.api.errors import ApiError, answer_error, error_body
from understudy.server.api.fields import read_json
from understudy.server.api.openapi import Html
from understudy.server.api.routes import no_such_response
from understudy.server.engine_apis import find_api
from understudy.server.faults import FaultOrder, Faults, active_faults, apply_order
from understudy.server.live_config import LiveConfig
from understudy.server.metrics.families import CONTENT_TYPE, OLD_CONTENT_TYPE, only
from understudy.server.metrics.others import add_adapters
from understudy.server.sglang.routes import check_by_generating

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Connection, Request
    from understudy.server.worker import Worker

log = logging.getLogger("understudy.server")

_VARY = b"vary: Origin\r\n"
_VARY_PREFLIGHT = (
    b"vary: Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    b"Access-Control-Request-Private-Network\r\n"
)
_METHODS = b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"


class App:
    """Answers the requests of one port. Never raises: an unhandled exception becomes a 500."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.settings = worker.settings
        self.max_body_bytes = worker.settings.max_body_bytes
        self.max_body_depth = worker.settings.max_body_depth
        self.api = find_api(worker.settings.kind)
        self.endpoints, self.routes = self.api.make_routes(worker)
        states = {"/load": self._load, "/health_generate": self._health_generate}
        self.own: dict[str, Callable[[Request, Connection], None]] = {
            self.api.metrics_route: self._metrics,
            "/health": self._health,
            "/health/ready": self._health,
            "/admin/config": self._config,
            "/admin/fault": self._fault,
        }
        if self.api.state_route is not None:
            self.own[self.api.state_route] = states[self.api.state_route]
        self.access = Access(
            keys=self.settings.api_keys,
            admin_hosts=self.settings.admin_hosts,
            origins=self.settings.allowed_origins,
            host=self.settings.host,
        )
        self.set_port(worker.settings.port)
        self.ready_at_s = time.monotonic() + worker.settings.startup_duration_s
        self.draining = False
        self.stopped = False
        """True while a fleet has scaled this worker away."""
        self._killed = False
        self.answering: set[Connection] = set()
        """Connections whose requests have not been answered in full."""
        self.before: list[Callable[[Request, Connection], bool]] = []
        """Hooks that run before the route, in order; one that answers the request returns True."""
        self.faults = Faults(
            worker, self.routes.generators, mark_dead=self._mark_dead, handle=self.handle_now
        )
        self.before.append(self.faults.before)
        if self.settings.enable_lora or worker.loras or self.settings.runtime_lora:
            add_adapters(worker.registry, self.settings.max_loras, self._adapters)
        self.live_config = LiveConfig(worker, self.faults)
        if self.settings.live_config:
            self.live_config.update(self.settings.live_config)

    @property
    def dead(self) -> bool:
        """True when an engine has failed, or an injected fault says so."""
        return self._killed or self.worker.failed

    @dead.setter
    def dead(self, dead: bool) -> None:
        self._mark_dead(dead)

    @property
    def takes_requests(self) -> bool:
        """True when a router may send it requests."""
        gone = self.dead or self.draining or self.stopped
        return not gone and time.monotonic() >= self.ready_at_s

    def _mark_dead(self, dead: bool) -> None:
        self._killed = dead

    def set_port(self, port: int) -> None:
        """Set the port that answers name in their headers."""
        self._headers = _VARY + _pod_headers(port)

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer a request, now or when the engine has finished it."""
        began = time.monotonic()
        method, size = request.method, len(request.body)
        http = self.worker.http
        self.answering.add(connection)

        def answered(status: int, sent: int) -> None:
            self.answering.discard(connection)
            http.answered(method, status, time.monotonic() - began, size, sent)

        connection.on_answered = answered
        connection.error_form = None
        if (form := self.api.error_form) is not None:
            connection.error_form = lambda error: form(error, request.path)
        connection.extra_headers = self._headers + self._request_id(request)
        try:
            self._answer(request, connection)
        except Exception as error:
            answer_error(error, connection)

    def _request_id(self, request: Request) -> bytes:
        """Build the X-Request-Id header if enabled: the client's id, or a new one."""
        if not self.settings.enable_request_id_headers:
            return b""
        shown = request.headers.get("x-request-id") or secrets.token_hex(16)
        return f"x-request-id: {shown}\r\n".encode("latin-1", "replace")

    def _adapters(self) -> tuple[list[str], list[str]]:
        """List the adapters of running and of waiting requests."""
        running: list[str] = []
        waiting: list[str] = []
        for generation in self.endpoints.in_flight:
            if generation.model in self.worker.loras:
                # A long request is planned in slices, and has no choices until the last.
                request = generation.choices[0].request if generation.choices else None
                admitted = request is not None and request.admitted_ns >= 0
                (running if admitted else waiting).append(generation.model)
        return running, waiting

    def malformed(self, status: int, why: str) -> bytes:
        """Build the body of the answer to a malformed request."""
        return error_body(status, why, "Bad Request")

    def _answer(self, request: Request, connection: Connection) -> None:
        origin = request.headers.get("origin")
        if origin is not None and self._cors(request, connection, origin):
            return
        try:
            self.access.check(self.class_of(request.path), request, connection)
        except Unauthorized:
            connection.extra_headers = connection.extra_headers.replace(_VARY, b"")
            raise
        for first in self.before:
            if first(request, connection):
                return
        self._by_path(request, connection)

    def handle_now(self, request: Request, connection: Connection) -> None:
        """Answer a request that was delayed."""
        if connection.closed:
            return
        try:
            self._by_path(request, connection)
        except Exception as error:
            answer_error(error, connection)

    def class_of(self, path: str) -> RouteClass:
        """Classify a path. A path without a route is public: it gets vLLM's 404."""
        kind = self.api.classify(path)
        if kind is not RouteClass.CONTROL or path.startswith("/admin/"):
            return kind
        tables, bare = (self.own, self.routes.plain, self.routes.generators), path.rstrip("/")
        return kind if any(bare in table for table in tables) else RouteClass.PUBLIC

    def _by_path(self, request: Request, connection: Connection) -> None:
        own = self.own.get("/metrics" if request.path.startswith("/metrics/") else request.path)
        if own is not None:
            own(request, connection)
        else:
            self._route(request, connection)

    def _load(self, request: Request, connection: Connection) -> None:
        if request.method != "GET":
            self._wrong_method(connection, "GET")
            return
        load = len(self.answering) - 1 if self.settings.enable_server_load_tracking else 0
        connection.respond(200, msgspec.json.encode({"server_load": load}))

    def _route(self, request: Request, connection: Connection) -> None:
        generators = self.routes.generators
        if request.path in generators:
            allowed = self.routes.methods_of(request.path)
            if request.method not in allowed:
                self._wrong_method(connection, ", ".join(allowed))
                return
            if self.dead:
                raise ApiError("the engine has died", status=500, kind="InternalServerError")
            if self.stopped:
                raise ApiError("the worker has stopped", status=503, kind="Service Unavailable")
            if time.monotonic() < self.ready_at_s:
                raise ApiError("the model is loading", status=503, kind="Service Unavailable")
            if self.draining:
                raise ApiError("the server is shutting down", status=503, kind="Service Unavailable")
            body = self.routes.read(request)
            if self.settings.enable_log_requests:
                log.info("%s %s", request.path, body.get("request_id", ""))
            generators[request.path](body, request, connection)
            return
        plain = self.routes.plain.get(request.path)
        if plain is None:
            self._unknown(request, connection)
            return
        answer = plain.get(request.method)
        if answer is None:
            self._wrong_method(connection, ", ".join(plain))
            return
        query = {name: values[-1] for name, values in parse_qs(request.query).items()}
        status, reply = answer(request, query)
        if isinstance(reply, Later):
            reply.start(lambda result: _send_later(connection, status, result))
        elif isinstance(reply, str):
            connection.respond(
                status, reply.encode(), "text/html; charset=utf-8" if isinstance(reply, Html) else ""
            )
        elif reply is None:
            connection.respond(status, b"", "")
        else:
            connection.respond(status, encode(reply))

    def _unknown(self, request: Request, connection: Connection) -> None:
        """Answer an unknown path: 404, or a redirect when it has one slash too many."""
        parts = request.path.split("/")
        if request.path.startswith("/v1/responses/") and len(parts) in (4, 5) and parts[-1]:
            method = "GET" if len(parts) == 4 else "POST"
            if parts[4:] in ([], ["cancel"]):
                if request.method != method:
                    self._wrong_method(connection, method)
                    return
                raise no_such_response(parts[3])
        if (
            self.routes.adapters is not None
            and request.path.startswith(PREFIX)
            and len(parts) == 3
            and parts[2]
        ):
            if request.method != "DELETE":
                self._wrong_method(connection, "DELETE")
                return
            status, text = self.routes.adapters.delete(request.path)
            connection.respond(status, text.encode(), "")
            return
        bare = request.path.rstrip("/")
        if bare != request.path and (
            bare in self.routes.plain or bare in self.routes.generators or bare in ("/health", "/load")
        ):
            where = f"{self.worker.settings.scheme}://{request.headers.get('host', 'localhost')}{bare}"
            if request.query:
                where += f"?{request.query}"
            headers = f"location: {where}\r\n".encode("latin-1", "replace")
            connection.respond(307, b"", "", headers)
            return
        connection.respond(404, b'{"detail":"Not Found"}')

    def _config(self, request: Request, connection: Connection) -> None:
        status, reply = self.live_config.answer(request)
        connection.respond(status, encode(reply))

    def _fault(self, request: Request, connection: Connection) -> None:
        """List the faults of this worker, or order one."""
        if request.method == "GET":
            connection.respond(200, encode(active_faults([self])))
        elif request.method == "POST":
            order = FaultOrder.read(read_json(request))
            connection.respond(200, encode(apply_order(order, [self])))
        else:
            self._wrong_method(connection, "GET, POST")

    def _metrics(self, request: Request, connection: Connection) -> None:
        """Send the metrics; paths below /metrics and other methods get the older format and filter by name."""
        page = self.worker.registry.render()
        if request.path == "/metrics" and request.method == "GET":
            connection.respond(200, page, CONTENT_TYPE)
            return
        names = parse_qs(request.query).get("name[]")
        connection.respond(200, only(page, set(names)) if names else page, OLD_CONTENT_TYPE)

    def _health(self, request: Request, connection: Connection) -> None:
        if request.method != "GET":
            self._wrong_method(connection, "GET")
            return
        up = not (self.dead or self.stopped) and time.monotonic() >= self.ready_at_s
        connection.respond(200 if up else 503, b"", "")

    def _health_generate(self, request: Request, connection: Connection) -> None:
        """Answer once the engine has computed a token; at once if it has requests."""
        if request.method != "GET":
            self._wrong_method(connection, "GET")
        elif self.dead or self.stopped or time.monotonic() < self.ready_at_s:
            connection.respond(503, b"", "")
        else:
            check_by_generating(self.worker, lambda up: connection.respond(200 if up else 503, b"", ""))

    def _wrong_method(self, connection: Connection, allowed: str) -> None:
        connection.respond(405, b'{"detail":"Method Not Allowed"}', headers=f"allow: {allowed}\r\n".encode())

    def _cors(self, request: Request, connection: Connection, origin: str) -> bool:
        """Answer a CORS preflight (True), or add headers to the coming answer (False)."""
        allowed = "*" in self.settings.allowed_origins or origin in self.settings.allowed_origins
        preflight = request.method == "OPTIONS" and "access-control-request-method" in request.headers
        shown = b""
        if allowed and "\r" not in origin and "\n" not in origin:
            shown = f"access-control-allow-origin: {origin}\r\n".encode("latin-1", "replace")
        connection.extra_headers += shown
        if not preflight:
            return False
        headers = b"access-control-allow-methods: " + _METHODS + b"\r\naccess-control-max-age: 600\r\n"
        wanted = request.headers.get("access-control-request-headers")
        if wanted is not None:
            headers += f"access-control-allow-headers: {wanted}\r\n".encode("latin-1", "replace")
        connection.extra_headers = connection.extra_headers.replace(_VARY, _VARY_PREFLIGHT)
        text = b"OK" if allowed else b"Disallowed CORS origin"
        connection.respond(200 if allowed else 400, text, "text/plain; charset=utf-8", headers)
        return True


def _send_later(connection: Connection, status: int, result: Any) -> None:
    if isinstance(result, PlainReply):
        connection.respond(result.status, result.text.encode(), "")
    else:
        connection.respond(status, encode(result))


def _pod_headers(port: int) -> bytes:
    """Build the pod headers of llm-d-inference-sim from POD_NAME and POD_NAMESPACE."""
    pod, space = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
    headers = {"x-inference-pod": pod, "x-inference-namespace": space}
    if pod:
        headers["x-inference-port"] = str(port)
    lines = "".join(
        f"{name}: {value}\r\n" for name, value in headers.items() if value and value.isprintable()
    )
    return lines.encode("latin-1", "replace")


def encode(reply: Any) -> bytes:
    """Encode a reply as JSON."""
    return msgspec.json.encode(reply)
