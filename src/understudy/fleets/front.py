"""The front end of a fleet: routes requests, shows the fleet, injects faults."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from understudy._core import Identities, xxh3_64
from understudy.errors import PolicyError, WrongState
from understudy.fleets.assets import show_page
from understudy.fleets.elastic import ElasticFleet
from understudy.fleets.monitor import SAMPLED_EVERY_S, Monitor
from understudy.fleets.report import STATES, Report, describe_worker, read_report, state_of
from understudy.fleets.scale import ScaleOrder
from understudy.fleets.staged import StagedForward
from understudy.router.dispatch import Decision, LiveRouteRequest, name_policy
from understudy.server.access import Access, route_class
from understudy.server.api.errors import ApiError, answer_error, error_body
from understudy.server.api.fields import read_body, read_json, whole_number
from understudy.server.faults import FaultOrder, active_faults, apply_order
from understudy.server.metrics import Registry
from understudy.server.metrics.families import CONTENT_TYPE
from understudy.server.metrics.late import add_lateness
from understudy.server.metrics.merged import merge, to_rows
from understudy.server.metrics.process import HttpMetrics, add_process
from understudy.server.metrics.vllm import FIRST_TOKEN_S
from understudy.server.quantiles import FINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.routing import FleetRouting
    from understudy.http import Connection, Request
    from understudy.run.autoscale import Autoscale
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.faults import FaultPlan
    from understudy.server.metrics.families import Histogram
    from understudy.server.server import Server
    from understudy.server.settings import ServerSettings

LATENESS_SAMPLES = 10


class FleetFront:
    """Answers on the fleet's front-end port."""

    def __init__(
        self,
        servers: list[Server],
        routing: FleetRouting,
        pools: Sequence[tuple[int, ServerSettings]],
        name: str,
        access: Access,
        *,
        starts: Sequence[int] | None = None,
        autoscale: Autoscale | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        """`pools`: with the most workers of each; `starts`: those that begin, of each (None: all)."""
        self.servers = servers
        self._access = access
        self.max_body_bytes = servers[0].settings.max_body_bytes
        self.max_body_depth = servers[0].settings.max_body_depth
        self._router = routing
        self._dispatcher = routing.dispatcher
        self._no_blocks = Identities.from_local_hashes([])
        self._stages: StagedForward | None = None
        self.monitor = Monitor(pools, name, lambda: routing.dispatcher.num_waiting)
        self._sampler: asyncio.TimerHandle | None = None
        self._late_ms = [0.0] * len(servers)
        self._token_counts: deque[list[int]] = deque(maxlen=LATENESS_SAMPLES)
        self.registry = Registry()
        add_process(self.registry)
        self.http = HttpMetrics(self.registry)
        self.elastic = ElasticFleet(
            servers,
            routing,
            pools,
            starts=starts,
            autoscale=autoscale,
            faults=faults,
            on_sent=self._note_sent,
        )
        self.elastic.add_metrics(self.registry)
        self._ledger = self.elastic.ledger
        self._routed = [
            self.registry.counter(
                "understudy:routed_requests", "Requests sent to a worker.", worker=str(index)
            )
            for index in range(len(servers))
        ]
        runtime = servers[0].runtime
        add_lateness(self.registry, runtime.driver.step_lateness, runtime.token_lateness)
        self.registry.gauge(
            "understudy:router_degraded",
            "1: a user-defined router missed events, because its observe() raised.",
            lambda: float(bool(routing.dispatcher.missed_batches)),
        )
        for state in STATES:
            self.registry.gauge(
                "understudy:fleet_workers",
                "Workers by state.",
                lambda state=state: float(self._states().count(state)),  # type: ignore[misc]
                state=state,
            )
        self.own: dict[str, dict[str, Callable[[Request, Connection], None]]] = {
            "/": {"GET": show_page},
            "/page/": {"GET": show_page},
            "/metrics": {"GET": self._metrics, "HEAD": self._metrics},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health},
            "/fleet/state": {"GET": self._state},
            "/fleet/events": {"GET": self._watch},
            "/fleet/workers/": {"GET": self._worker},
            "/fleet/report": {"GET": self._report},
            "/fleet/metrics": {"GET": self._merged},
            "/admin/fault": {"GET": self._faults, "POST": self._order},
            "/admin/scale": {"GET": self._sizes, "POST": self._resize},
        }
        """Routes of the front end itself, by path and method; a path that ends with a slash covers those below it."""

    def divide(self, settings: Disaggregation, decode: FleetRouting) -> None:
        """Send prompts to prefill workers and answers from decode workers, from now on."""
        self._stages = StagedForward(self.servers, settings, self._router, decode, self._note_sent)
        self.monitor.stages["decode"] = name_policy(settings.decode_routing)
        self._stages.first_token = self.registry.histogram(
            "understudy:time_to_first_token_seconds",
            "From a request's arrival at the front end to its first token.",
            FIRST_TOKEN_S,
            FINE_S,
        )
        for way in self._stages.ways:
            self.registry.gauge(
                "understudy:requests_by_way",
                "Requests whose prompt a prefill worker (remote) or the decode worker (local) has computed.",
                lambda way=way: float(self._stages.ways[way]) if self._stages else 0.0,  # type: ignore[misc]
                way=way,
            )

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
            own = self.own.get(route_of(request.path), {}).get(request.method)
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

    def _metrics(self, _: Request, connection: Connection) -> None:
        """Send the front end's own metrics and those of all engines, merged."""
        merged = merge(server.worker.registry for server in self.servers)
        connection.respond(200, self.registry.render() + merged.render(), CONTENT_TYPE)

    def _merged(self, _: Request, connection: Connection) -> None:
        merged = merge(server.worker.registry for server in self.servers)
        connection.respond(200, msgspec.json.encode(to_rows(merged)))

    def _states(self) -> list[str]:
        now_s = time.monotonic()
        return [
            state_of(server.app, server.app.faults.kinds, late_ms, now_s)
            for server, late_ms in zip(self.servers, self._late_ms, strict=True)
        ]

    def _health(self, _: Request, connection: Connection) -> None:
        up = any(not (server.app.dead or server.app.stopped) for server in self.servers)
        connection.respond(200 if up else 503, b"", "")

    def _faults(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(active_faults([server.app for server in self.servers])))

    def _order(self, request: Request, connection: Connection) -> None:
        order = FaultOrder.read(read_json(request))
        report = apply_order(order, [server.app for server in self.servers])
        connection.respond(200, msgspec.json.encode(report))

    def _sizes(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode({"pools": self.elastic.scale.count()}))

    def _resize(self, request: Request, connection: Connection) -> None:
        order = ScaleOrder.read(read_json(request))
        connection.respond(200, msgspec.json.encode(self.elastic.scale.apply(order)))

    def _forward(self, request: Request, connection: Connection) -> None:
        tables = [server.app.routes for server in self.servers]
        if request.method != "POST" or not all(request.path in table.generators for table in tables):
            having = [index for index, table in enumerate(tables) if table.methods_of(request.path)]
            self.servers[self._first_alive(having)].app.handle(request, connection)
            return
        self._ledger.begin(connection)
        connection.on_ended = partial(self._ledger.end, connection)
        if self.elastic.scaler is not None:
            self.elastic.scaler.on_arrival()
        self._router.update_availability()
        asked = self._asked(request)
        if self._stages is not None:
            self._stages.forward(request, connection, asked)
            return
        self._dispatch(asked, request, connection)

    def _dispatch(self, asked: LiveRouteRequest, request: Request, connection: Connection) -> None:
        """Send a request to a worker, now or when the router releases it."""
        on_answered = connection.on_answered

        def go(decision: Decision) -> None:
            self._send(asked, decision, request, connection)

        def refuse() -> None:  # the first worker answers with its error
            connection.on_close, connection.on_answered = None, on_answered
            self.servers[0].app.handle(request, connection)

        connection.on_close = lambda: self._dispatcher.ended(asked.row)
        try:
            self._dispatcher.dispatch(asked, go)
        except WrongState:  # no worker is available
            if self.elastic.lost is None:
                refuse()
            else:
                self.elastic.lost.wait_for_worker(
                    connection, partial(self._dispatch_again, asked, request, connection), refuse
                )
        except PolicyError as error:
            connection.on_close = None
            raise ApiError(str(error), status=500, kind="InternalServerError") from error

    def _dispatch_again(self, asked: LiveRouteRequest, request: Request, connection: Connection) -> None:
        self._router.update_availability()
        try:
            self._dispatch(asked, request, connection)
        except Exception as error:
            answer_error(error, connection)

    def _asked(self, request: Request) -> LiveRouteRequest:
        """Build the policy's view of a request. A policy without blocks gets an estimated length."""
        tokens, blocks = len(request.body) // 5, self._no_blocks
        wants_blocks = self._dispatcher.wants_blocks if self._stages is None else self._stages.wants_blocks
        if wants_blocks:
            try:
                tokens, found = self.servers[0].app.endpoints.reads.prompt_blocks(read_body(request))
                blocks = blocks if found is None else found
            except ApiError:  # the worker will answer with the error
                pass
        session = request.headers.get("x-session-id") or request.headers.get("x-session-affinity")
        parent = request.headers.get("x-parent-session-id")
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
            None if parent is None else xxh3_64(parent.encode()),
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
        self._note_sent(asked, decision, chosen, request.path, rank)
        row, dispatcher = asked.row, self._dispatcher
        connection.on_first_token = lambda: dispatcher.first_token(row)
        connection.on_ended = partial(self._on_ended, row, connection)
        if self.elastic.lost is not None:
            self.elastic.lost.note_sent(connection, asked, request.path)
        server.app.handle(request, connection)
        connection.extra_headers += f"x-understudy-worker: {chosen}\r\n".encode()

    def _on_ended(self, row: int, connection: Connection) -> None:
        self._dispatcher.ended(row)
        if self.elastic.lost is not None:
            self.elastic.lost.note_ended(connection)
        self._ledger.end(connection)

    def _note_sent(
        self, asked: LiveRouteRequest, decision: Decision, chosen: int, path: str, rank: int = 0
    ) -> None:
        """Count a request that is sent to a worker, and keep the decision for the page."""
        self._routed[chosen].add()
        if decision.overlap_blocks is None and len(asked.prompt_blocks):
            # The router has no index of its own, so the page shows the blocks that the worker has.
            cached = self.servers[chosen].worker.cores[rank].engine.cached_prefix(asked.prompt_blocks)
            decision = decision._replace(overlap_blocks=cached)
        load = len(self.servers[chosen].app.endpoints.in_flight)
        self.monitor.decided(decision, asked, chosen, path, load)

    def _first_alive(self, preferred: Sequence[int] = ()) -> int:
        """Return the first worker that is alive, of the preferred ones (those with a route) if there are any."""
        among = preferred or range(len(self.servers))
        apps = {index: self.servers[index].app for index in among}
        return next((index for index in among if not (apps[index].dead or apps[index].stopped)), among[0])

    # ── The page ──

    def start(self) -> None:
        """Sample the workers from now on."""
        self._sampler = asyncio.get_running_loop().call_later(SAMPLED_EVERY_S, self._sample)

    def _sample(self) -> None:
        self.start()  # first, so that a failure does not end the samples
        for index, server in enumerate(self.servers):
            self._late_ms[index] = round(server.worker.max_lateness_s * 1e3, 1)
            server.worker.max_lateness_s = 0.0
        self._token_counts.append(list(self.servers[0].runtime.token_lateness.counts))
        self.monitor.sample(self.report())

    def report(self) -> Report:
        """Report on the workers as they are now."""
        runtime = self.servers[0].runtime
        tokens, steps = runtime.token_lateness, runtime.driver.step_lateness
        since = self._token_counts[0] if self._token_counts else None
        late = {
            "token_p50": round(tokens.quantile(0.5, since) * 1e3, 3),
            "token_p99": round(tokens.quantile(0.99, since) * 1e3, 3),
            "step_p99": round(steps.quantile(0.99) * 1e3, 3),
        }
        report = read_report(self.servers, self._late_ms, late)
        if self._stages is None or self._stages.first_token is None:
            return report
        # Workers count from a request's arrival at each of them.
        totals = msgspec.structs.replace(report.totals, first_tokens=list(self._stages.first_token.counts))
        return msgspec.structs.replace(report, totals=totals)

    def first_tokens(self) -> list[Histogram]:
        """Return the distributions of the TTFT as clients of the fleet see it, in simulated seconds."""
        if self._stages is not None and self._stages.first_token is not None:
            return [self._stages.first_token]
        return [metrics.first_token for server in self.servers for metrics in server.worker.metrics]

    def _report(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(self.report()))

    def _state(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(self.monitor.state(self.report())))

    def _watch(self, _: Request, connection: Connection) -> None:
        self.monitor.watch(connection, self.report())

    def _worker(self, request: Request, connection: Connection) -> None:
        number = whole_number(request.path.rpartition("/")[2])
        if number is None or not 0 <= number < len(self.servers):
            raise ApiError(f"there are workers 0 … {len(self.servers) - 1}", status=404, kind="NotFoundError")
        connection.respond(200, msgspec.json.encode(describe_worker(self.servers[number], number)))

    def close(self) -> None:
        """Stop sampling and disconnect the watchers."""
        if self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
        self.elastic.close()
        self.monitor.close()


def route_of(path: str) -> str:
    """Return the key of a path in the table of routes."""
    for below in ("/fleet/workers/", "/page/"):
        if path.startswith(below):
            return below
    return "/metrics" if path == "/metrics/" else path
