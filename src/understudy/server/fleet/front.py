"""The front end of a fleet: routes requests, shows the fleet, injects faults."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import Identities, xxh3_64
from understudy.errors import PolicyError, WrongState
from understudy.router.dispatch import Decision, LiveRouteRequest
from understudy.server.access import Access, route_class
from understudy.server.api.errors import ApiError, answer_error, error_body
from understudy.server.api.fields import read_body, read_json, whole_number
from understudy.server.faults import FaultOrder, active_faults, apply_order
from understudy.server.metrics import Registry
from understudy.server.metrics.families import CONTENT_TYPE
from understudy.server.metrics.process import HttpMetrics, add_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.fleet.routing import FleetRouting
    from understudy.server.http import Connection, Request
    from understudy.server.server import Server

SHOWN_EVERY_S = 0.5
KEPT_DECISIONS = 60
SHOWN_DECISIONS = 24


def in_numbers(
    decision: Decision, asked: LiveRouteRequest, worker: int, path: str, why: str, load: int
) -> dict[str, Any]:
    """Describe a routing decision for the page."""
    return {
        "at": time.time(),
        "worker": worker,
        "path": path,
        "tokens": asked.prompt_tokens,
        "why": why,
        "overlap": decision.overlap_blocks,
        "lower": decision.lower_overlap_blocks,
        "best": decision.best_overlap_blocks,
        "cost": round(decision.cost, 2),
        "ties": decision.ties,
        "waited_ms": round(decision.waited_ms, 1),
        "blocks": len(asked.prompt_blocks),
        "load": load,
    }


class FleetFront:
    """Answers on the fleet's front-end port."""

    def __init__(self, servers: list[Server], routing: FleetRouting, name: str, access: Access) -> None:
        self.servers = servers
        self._access = access
        self.routing = name
        self.max_body_bytes = servers[0].settings.max_body_bytes
        self.max_body_depth = servers[0].settings.max_body_depth
        self._router = routing
        self._dispatcher = routing.dispatcher
        self._no_blocks = Identities.from_local_hashes([])
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._watchers: set[Connection] = set()
        self._shower: asyncio.TimerHandle | None = None
        self._last_tokens = [0.0] * len(servers)
        self._rates = [0.0] * len(servers)
        self._late_ms = [0.0] * len(servers)
        self._token_counts: deque[list[int]] = deque(maxlen=20)
        self._last_shown_s = time.monotonic()
        self.registry = Registry()
        add_process(self.registry)
        self.http = HttpMetrics(self.registry)
        self._routed = [
            self.registry.counter(
                "understudy:routed_requests", "Requests sent to a worker.", worker=str(index)
            )
            for index in range(len(servers))
        ]
        self._page = files(__package__).joinpath("page.html").read_bytes()
        self.own: dict[str, dict[str, Callable[[Request, Connection], None]]] = {
            "/": {"GET": self._show_page},
            "/metrics": {"GET": self._metrics, "HEAD": self._metrics},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health},
            "/fleet/state": {"GET": self._state},
            "/fleet/events": {"GET": self._watch},
            "/fleet/workers/": {"GET": self._worker},
            "/admin/fault": {"GET": self._faults, "POST": self._order},
        }
        """Routes of the front end itself, by path and method; a path that ends with a slash covers those below it."""

    # ── HTTP ──

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer a request, or forward it to a worker."""
        began = time.monotonic()
        method, size = request.method, len(request.body)

        def answered(status: int, sent: int) -> None:
            self.http.answered(method, status, time.monotonic() - began, size, sent)

        connection.on_answered = answered
        connection.extra_headers = b""
        try:
            own = self.own.get(_route_of(request.path), {}).get(request.method)
            if own is None:
                self._forward(request, connection)
            else:
                self._access.check(route_class(request.path), request, connection)
                own(request, connection)
        except Exception as error:
            answer_error(error, connection)

    def malformed(self, status: int, why: str) -> bytes:
        """Build the body of the answer to a malformed request."""
        return error_body(status, why, "Bad Request")

    def _show_page(self, _: Request, connection: Connection) -> None:
        connection.respond(200, self._page, "text/html; charset=utf-8")

    def _metrics(self, _: Request, connection: Connection) -> None:
        connection.respond(200, self.registry.render(), CONTENT_TYPE)

    def _health(self, _: Request, connection: Connection) -> None:
        up = any(not server.app.dead for server in self.servers)
        connection.respond(200 if up else 503, b"", "")

    def _faults(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(active_faults([server.app for server in self.servers])))

    def _order(self, request: Request, connection: Connection) -> None:
        order = FaultOrder.read(read_json(request))
        report = apply_order(order, [server.app for server in self.servers])
        connection.respond(200, msgspec.json.encode(report))

    def _forward(self, request: Request, connection: Connection) -> None:
        generators = self.servers[0].app.routes.generators
        if request.path not in generators or request.method != "POST":
            self.servers[self._first_alive()].app.handle(request, connection)
            return
        self._router.update_availability()
        asked = self._asked(request)
        on_answered = connection.on_answered

        def go(decision: Decision) -> None:
            self._send(asked, decision, request, connection)

        connection.on_close = lambda: self._dispatcher.ended(asked.row)
        try:
            self._dispatcher.dispatch(asked, go)
        except WrongState:  # no worker is available: the first one answers with its error
            connection.on_close, connection.on_answered = None, on_answered
            self.servers[0].app.handle(request, connection)
        except PolicyError as error:
            connection.on_close = None
            raise ApiError(str(error), status=500, kind="InternalServerError") from error

    def _asked(self, request: Request) -> LiveRouteRequest:
        """Build the policy's view of a request. A policy without blocks gets an estimated length."""
        tokens, blocks = len(request.body) // 5, self._no_blocks
        if self._dispatcher.wants_blocks:
            try:
                tokens, found = self.servers[0].app.endpoints.reads.prompt_blocks(read_body(request))
                blocks = blocks if found is None else found
            except ApiError:  # the worker will answer with the error
                pass
        session = request.headers.get("x-session-id") or request.headers.get("x-session-affinity")
        priority = whole_number(request.headers.get("x-vllm-priority", ""), 9)
        return LiveRouteRequest(
            self._dispatcher.next_row(),
            self.servers[0].runtime.clock.now_ns(),
            tokens,
            0,
            # vLLM schedules lower numbers first, a router's queue higher ones.
            -(priority or 0),
            self.servers[0].settings.engine.block_size,
            blocks,
            None if session is None else xxh3_64(session.encode()),
        )

    def _send(
        self, asked: LiveRouteRequest, decision: Decision, request: Request, connection: Connection
    ) -> None:
        if connection.closed:
            self._dispatcher.ended(asked.row)
            return
        chosen, rank = self._router.targets[decision.worker]
        server = self.servers[chosen]
        if len(server.worker.cores) > 1:
            request.headers.setdefault("x-data-parallel-rank", str(rank))
        self._routed[chosen].add()
        load = len(server.app.endpoints.in_flight)
        self._decisions.append(in_numbers(decision, asked, chosen, request.path, self.routing, load))
        row, dispatcher = asked.row, self._dispatcher
        connection.on_first_token = lambda: dispatcher.first_token(row)
        connection.on_ended = lambda: dispatcher.ended(row)
        server.app.handle(request, connection)
        connection.extra_headers += f"x-understudy-worker: {chosen}\r\n".encode()

    def _first_alive(self) -> int:
        alive = (index for index, server in enumerate(self.servers) if not server.app.dead)
        return next(alive, 0)

    # ── The page ──

    def _state(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(self.state()))

    def state(self) -> dict[str, Any]:
        """Return the state of the fleet in columns, one value per worker."""
        self._measure_rates()
        columns: dict[str, list[float]] = {
            name: []
            for name in ("running", "waiting", "usage", "host", "hit", "rate", "late_ms", "tokens", "dead")
        }
        for index, server in enumerate(self.servers):
            cores, metrics = server.worker.cores, server.worker.metrics
            tokens = sum(one.generation_tokens.value for one in metrics)
            queried = sum(one.queries.value for one in metrics)
            found = sum(one.hits.value + one.external_hits.value for one in metrics)
            columns["running"].append(sum(core.num_running for core in cores))
            columns["waiting"].append(sum(core.num_waiting for core in cores))
            columns["usage"].append(round(max(core.usage for core in cores), 4))
            columns["host"].append(round(max(core.host_usage for core in cores), 4))
            columns["hit"].append(round(found / queried, 4) if queried else 0.0)
            columns["rate"].append(self._rates[index])
            columns["late_ms"].append(self._late_ms[index])
            columns["tokens"].append(tokens)
            columns["dead"].append(int(server.app.dead))
        runtime = self.servers[0].runtime
        since = self._token_counts[0] if self._token_counts else None
        return {
            "workers": columns,
            "ports": [server.port for server in self.servers],
            "routing": self.routing,
            "queued": self._dispatcher.num_waiting,
            "late_ms": {
                "token_p50": round(runtime.token_lateness.quantile(0.5, since) * 1e3, 3),
                "token_p99": round(runtime.token_lateness.quantile(0.99, since) * 1e3, 3),
                "step_p99": round(runtime.driver.step_lateness.quantile(0.99) * 1e3, 3),
            },
            "decisions": list(self._decisions)[-SHOWN_DECISIONS:],
        }

    def _measure_rates(self) -> None:
        """Measure tokens per second and the greatest lateness since the last call."""
        now_s = time.monotonic()
        passed_s = now_s - self._last_shown_s
        if passed_s < 0.8 * SHOWN_EVERY_S:
            return
        for index, server in enumerate(self.servers):
            tokens = sum(one.generation_tokens.value for one in server.worker.metrics)
            self._rates[index] = round((tokens - self._last_tokens[index]) / passed_s, 1)
            self._last_tokens[index] = tokens
            self._late_ms[index] = round(server.worker.max_lateness_s * 1e3, 1)
            server.worker.max_lateness_s = 0.0
        self._last_shown_s = now_s
        self._token_counts.append(list(self.servers[0].runtime.token_lateness.counts))

    def _worker(self, request: Request, connection: Connection) -> None:
        number = whole_number(request.path.rpartition("/")[2])
        if number is None or not 0 <= number < len(self.servers):
            raise ApiError(f"there are workers 0 … {len(self.servers) - 1}", status=404, kind="NotFoundError")
        server = self.servers[number]
        now_ns = server.runtime.clock.now_ns()
        requests = [
            {
                "id": request.name,
                "prompt": request.prompt_tokens,
                "cached": request.cached_tokens,
                "done": request.emitted,
                "of": request.max_tokens,
                "age_ms": round((now_ns - request.arrival_ns) / 1e6),
                "state": "running" if request.admitted_ns >= 0 else "waiting",
            }
            for request in server.worker.live()
        ]
        state = {
            "worker": number,
            "port": server.port,
            "model": server.settings.names[0],
            "requests": requests,
        }
        connection.respond(200, msgspec.json.encode(state))

    def _watch(self, _: Request, connection: Connection) -> None:
        connection.start_stream(b"cache-control: no-store\r\n")
        self._watchers.add(connection)
        connection.on_close = lambda: self._watchers.discard(connection)
        self._send_state(connection)
        if self._shower is None:
            self._shower = asyncio.get_running_loop().call_later(SHOWN_EVERY_S, self._show)

    def _show(self) -> None:
        """Send the state to all watchers; stop when there is none."""
        self._shower = None
        self._watchers = {watcher for watcher in self._watchers if not watcher.closed}
        if not self._watchers:
            return
        data = b"data: " + msgspec.json.encode(self.state()) + b"\n\n"
        for watcher in self._watchers:
            watcher.send_event(data)
            watcher.flush()
        self._shower = asyncio.get_running_loop().call_later(SHOWN_EVERY_S, self._show)

    def _send_state(self, connection: Connection) -> None:
        connection.send_event(b"data: " + msgspec.json.encode(self.state()) + b"\n\n")
        connection.flush()

    def close(self) -> None:
        """Disconnect the watchers."""
        if self._shower is not None:
            self._shower.cancel()
            self._shower = None
        for watcher in self._watchers:
            watcher.drop()


def _route_of(path: str) -> str:
    """Return the key of a path in the table of routes."""
    if path.startswith("/fleet/workers/"):
        return "/fleet/workers/"
    return "/metrics" if path == "/metrics/" else path
