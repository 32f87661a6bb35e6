"""The front door of a fleet: routes requests, shows the fleet, takes orders for faults."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.errors import ApiError, error_body
from understudy.server.api.fields import read_body, read_json
from understudy.server.faults import FaultOrder, apply_order
from understudy.server.fleet.routing import KvAware, LiveFleetView, LiveRequestView
from understudy.server.metrics import Registry
from understudy.server.metrics.families import CONTENT_TYPE
from understudy.server.metrics.process import HttpMetrics, add_process

if TYPE_CHECKING:
    from understudy._core import Identities
    from understudy.server.fleet.routing import LiveRouter
    from understudy.server.http import Connection, Request
    from understudy.server.server import Server

SHOWN_EVERY_S = 0.5
KEPT_DECISIONS = 60


class FrontDoor:
    """Answers on the fleet's own port."""

    def __init__(self, servers: list[Server], router: LiveRouter, routing: str) -> None:
        self.servers = servers
        self.routing = routing
        self.max_body_bytes = servers[0].settings.max_body_bytes
        self._router = router
        self._view = LiveFleetView(servers)
        self._rows = 0
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._watchers: set[Connection] = set()
        self._shower: asyncio.TimerHandle | None = None
        self._last_tokens = [0.0] * len(servers)
        self._rates = [0.0] * len(servers)
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

    # ── HTTP ──

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer, or let a worker answer."""
        began = time.monotonic()
        method, size = request.method, len(request.body)

        def answered(status: int, sent: int) -> None:
            self.http.answered(method, status, time.monotonic() - began, size, sent)

        connection.on_answered = answered
        connection.extra_headers = b""
        try:
            if not self._own(request, connection):
                self._forward(request, connection)
        except ApiError as error:
            connection.respond(error.status, error.body())

    def malformed(self, status: int, why: str) -> bytes:
        """The body of the answer to bytes that are no request."""
        return error_body(status, why, "Bad Request")

    def _own(self, request: Request, connection: Connection) -> bool:
        """Paths of the door itself."""
        path = request.path
        if request.method == "GET":
            if path == "/":
                connection.respond(200, self._page, "text/html; charset=utf-8")
            elif path == "/fleet/events":
                self._watch(connection)
            elif path == "/fleet/state":
                connection.respond(200, msgspec.json.encode(self.state()))
            elif path.startswith("/fleet/workers/"):
                connection.respond(200, msgspec.json.encode(self._worker(path.rpartition("/")[2])))
            elif path in ("/metrics", "/metrics/"):
                connection.respond(200, self.registry.render(), CONTENT_TYPE)
            elif path in ("/health", "/ping"):
                up = any(not server.app.dead for server in self.servers)
                connection.respond(200 if up else 503, b"", "")
            else:
                return False
            return True
        if path == "/admin/fault" and request.method == "POST":
            order = FaultOrder.read(read_json(request.body))
            told = apply_order(order, [server.app for server in self.servers])
            connection.respond(200, msgspec.json.encode(told))
            return True
        return False

    def _forward(self, request: Request, connection: Connection) -> None:
        chosen, why = self._choose(request)
        if why is not None:
            self._routed[chosen].add()
            self._decisions.append(why)
        server = self.servers[chosen]
        connection.extra_headers = b""
        server.app.handle(request, connection)
        if why is not None:
            connection.extra_headers += f"x-understudy-worker: {chosen}\r\n".encode()

    def _choose(self, request: Request) -> tuple[int, dict[str, Any] | None]:
        generators = self.servers[0].app.routes.generators
        if request.path not in generators or request.method != "POST":
            return self._first_alive(), None
        blocks: Identities | None = None
        tokens = len(request.body) // 5
        if isinstance(self._router, KvAware):
            try:
                tokens, blocks = self.servers[0].app.endpoints.prompt_blocks(read_body(request))
            except ApiError:  # the worker says what is wrong with it
                blocks = None
        self._rows += 1
        view = LiveRequestView(
            self._rows,
            self._view.now_ns,
            tokens,
            0,
            0,
            self.servers[0].settings.engine.block_size,
            blocks,
        )
        chosen = self._router.choose(view, self._view)
        if self.servers[chosen].app.dead:
            chosen = self._first_alive()
        why = {
            "at": time.time(),
            "worker": chosen,
            "path": request.path,
            "tokens": tokens,
            "why": self.routing,
            "overlap": self._router.overlap_blocks if isinstance(self._router, KvAware) else 0,
            "blocks": 0 if blocks is None else len(blocks),
            "load": len(self.servers[chosen].app.endpoints.in_flight),
        }
        return chosen, why

    def _first_alive(self) -> int:
        alive = (index for index, server in enumerate(self.servers) if not server.app.dead)
        return next(alive, 0)

    # ── The page ──

    def state(self) -> dict[str, Any]:
        """The fleet in columns, a number a worker."""
        self._measure_rates()
        columns: dict[str, list[float]] = {
            name: [] for name in ("running", "waiting", "usage", "host", "hit", "rate", "tokens", "dead")
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
            columns["tokens"].append(tokens)
            columns["dead"].append(int(server.app.dead))
        stage = self.servers[0].stage
        since = self._token_counts[0] if self._token_counts else None
        return {
            "workers": columns,
            "ports": [server.port for server in self.servers],
            "routing": self.routing,
            "late_ms": {
                "token_p50": round(stage.token_lateness.quantile(0.5, since) * 1e3, 3),
                "token_p99": round(stage.token_lateness.quantile(0.99, since) * 1e3, 3),
                "step_p99": round(stage.driver.step_lateness.quantile(0.99) * 1e3, 3),
            },
            "decisions": list(self._decisions)[-24:],
        }

    def _measure_rates(self) -> None:
        """Tokens a second since the last time, for however many watch."""
        now_s = time.monotonic()
        passed_s = now_s - self._last_shown_s
        if passed_s < 0.8 * SHOWN_EVERY_S:
            return
        for index, server in enumerate(self.servers):
            tokens = sum(one.generation_tokens.value for one in server.worker.metrics)
            self._rates[index] = round((tokens - self._last_tokens[index]) / passed_s, 1)
            self._last_tokens[index] = tokens
        self._last_shown_s = now_s
        self._token_counts.append(list(self.servers[0].stage.token_lateness.counts))

    def _worker(self, name: str) -> dict[str, Any]:
        if not (name.isdigit() and len(name) < 7 and int(name) < len(self.servers)):
            raise ApiError(f"there are workers 0 … {len(self.servers) - 1}", status=404, kind="NotFoundError")
        server = self.servers[int(name)]
        now_ns = server.stage.clock.now_ns()
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
        return {
            "worker": int(name),
            "port": server.port,
            "model": server.settings.names[0],
            "requests": requests,
        }

    def _watch(self, connection: Connection) -> None:
        connection.start_stream(b"cache-control: no-store\r\n")
        self._watchers.add(connection)
        connection.on_close = lambda: self._watchers.discard(connection)
        self._send_state(connection)
        if self._shower is None:
            self._shower = asyncio.get_running_loop().call_later(SHOWN_EVERY_S, self._show)

    def _show(self) -> None:
        """Tell all that watch; nobody watches, nothing happens."""
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
        """Send the watchers away."""
        if self._shower is not None:
            self._shower.cancel()
            self._shower = None
        for watcher in self._watchers:
            watcher.drop()
