"""The router's HTTP handler: forwards requests to the engine that the policy chooses, and streams answers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from understudy._core import Identities, xxh3_64
from understudy.errors import PolicyError, WrongState
from understudy.http.bodies import MAX_BODY_BYTES, MAX_BODY_DEPTH
from understudy.proxy.about import About
from understudy.proxy.failover import EngineFailed, has_others, keep_from
from understudy.proxy.metrics import router_metrics
from understudy.proxy.upstream import OutOfFiles, Unreachable, UpstreamError
from understudy.router.dispatch import Decision, LiveRouteRequest
from understudy.server.access import route_class
from understudy.server.api.errors import SHUTTING_DOWN, ApiError, error_body
from understudy.server.api.fields import read_json, whole_number
from understudy.server.metrics.families import CONTENT_TYPE
from understudy.server.metrics.process import HttpMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from understudy.http import Connection, Outbox, Request
    from understudy.proxy.prompts import PromptReader
    from understudy.proxy.workers import ProxyWorker, Rank, Workers
    from understudy.router.dispatch import Dispatcher
    from understudy.server.access import Access

log = logging.getLogger("understudy.router")

GENERATES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations"),
    "/generate",  # SGLang's
)
_OWN_HEADERS = (
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "expect",
    "te",
    "upgrade",
)
_ANSWERS_OWN_HEADERS = (*_OWN_HEADERS, "date", "server", "content-type", "trailer")


class OwnPaths(Protocol):
    """Answers further paths at the router's port, and receives routing decisions."""

    async def answer(self, request: Request, connection: Connection) -> bool:
        """Return True when the request is answered, now or later."""

    def routed(self, request: Request, asked: LiveRouteRequest, decision: Decision, rank: Rank) -> None:
        """Receive the routing decision of a request."""


class Proxy:
    """Answers `/query`, `/register`, `/unregister`, `/dump`, `/health` and `/metrics`; passes the rest on."""

    def __init__(
        self,
        workers: Workers,
        dispatcher: Dispatcher,
        prompts: PromptReader,
        outbox: Outbox,
        access: Access,
        retries: int = 0,
    ) -> None:
        """Make the routes. `retries`: to how many more engines a request goes that one has failed."""
        self._access = access
        self._retries = retries
        self.max_body_bytes = MAX_BODY_BYTES
        self.max_body_depth = MAX_BODY_DEPTH
        self._workers = workers
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._outbox = outbox
        self._tasks: set[asyncio.Task[None]] = set()
        self._no_blocks = Identities.from_local_hashes([])
        self.counts = {"untokenized": 0, "retried": 0, "failed_over": 0}
        """Requests routed by load alone, because tokenization failed; sent again, because no connection could be made;
        and sent again, because an engine failed before the first byte of its answer's body."""
        self.registry = router_metrics(workers, lambda: {**self.counts, "waiting": dispatcher.num_waiting})
        self.http = HttpMetrics(self.registry)
        self._about = About(workers, dispatcher, prompts)
        self.own: OwnPaths | None = None
        self.routes: dict[str, dict[str, Callable[[Request, Connection], Coroutine[Any, Any, None]]]] = {
            "/query": {"POST": self._query},
            "/register": {"POST": self._register},
            "/unregister": {"POST": self._unregister},
            "/dump": {"GET": self._dump},
            **{path: {"POST": self._route} for path in GENERATES},
        }
        """By path and method, besides /metrics and /health; other requests go to an engine as they are."""
        self.draining = False

    @property
    def busy(self) -> bool:
        """True while answers are incomplete."""
        return bool(self._tasks)

    # ── HTTP ──

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer a request, now or after an engine."""
        began, method, size = time.monotonic(), request.method, len(request.body)

        def answered(status: int, sent: int) -> None:
            self.http.answered(method, status, time.monotonic() - began, size, sent)

        connection.on_answered = answered
        connection.extra_headers = b""
        try:
            self._access.check(route_class(request.path), request, connection)
        except ApiError as error:
            connection.respond(error.status, error.body())
            return
        pages = ("/metrics", "/metrics/") if self.own is None else ()
        if request.path in pages and method in ("GET", "HEAD"):
            connection.respond(200, self.registry.render(), CONTENT_TYPE)
            return
        if request.path == "/health":
            up = sum(worker.up for worker in self._workers.all)
            connection.respond(200 if up else 503, b"", "")
            return
        self._begin(self._answer(request, connection))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def malformed(self, status: int, why: str) -> bytes:
        """Build the body of the answer to a malformed request."""
        return error_body(status, why, "Bad Request")

    async def close(self) -> None:
        """Cancel all answers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, request: Request, connection: Connection) -> None:
        try:
            if self.own is not None and await self.own.answer(request, connection):
                return
            answer = self.routes.get(request.path, {}).get(request.method, self._pass_on)
            await answer(request, connection)
        except ApiError as error:
            connection.respond(error.status, error.body())
        except asyncio.CancelledError:  # the client has disconnected, or the router stops
            connection.end_early(503, SHUTTING_DOWN)
        except Exception:
            log.exception("unhandled exception in a request")
            connection.respond(500, error_body(500, "an error inside the router", "InternalServerError"))

    async def _query(self, request: Request, connection: Connection) -> None:
        self._reply(connection, await self._about.query(read_json(request)))

    async def _register(self, request: Request, connection: Connection) -> None:
        self._reply(connection, await self._about.register(read_json(request)))

    async def _unregister(self, request: Request, connection: Connection) -> None:
        self._reply(connection, self._about.unregister(read_json(request)))

    async def _dump(self, request: Request, connection: Connection) -> None:
        self._reply(connection, self._about.dump(request.query))

    def _reply(self, connection: Connection, value: Any) -> None:
        connection.respond(200, msgspec.json.encode(value))

    # ── Routed requests ──

    async def _route(self, request: Request, connection: Connection) -> None:
        if self.draining:
            raise ApiError("the router is shutting down", status=503, kind="Service Unavailable")
        asked = await self._asked(request)
        tried = 0
        failed: list[ProxyWorker] = []
        while True:
            row = asked.row
            decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

            def go(decision: Decision, decided: asyncio.Future[Decision] = decided) -> None:
                if not decided.done():
                    decided.set_result(decision)

            task = asyncio.current_task()
            assert task is not None
            connection.on_close = lambda task=task: task.cancel() and None
            try:
                with keep_from(self._workers, failed):
                    self._dispatcher.dispatch(asked, go)
                rank = self._workers.ranks[(await decided).worker]
                rank.routed += 1
                if self.own is not None:
                    self.own.routed(request, asked, await decided, rank)
                is_last = len(failed) >= self._retries or not has_others(
                    self._workers, [*failed, rank.worker]
                )
                if await self._send(request, connection, rank, asked, await decided, is_last=is_last):
                    return
                tried += 1
            except EngineFailed as error:
                failed.append(error.worker)
                if not has_others(self._workers, failed):
                    raise error.answer from error
                self.counts["failed_over"] += 1
                asked = asked._replace(row=self._dispatcher.next_row())
                continue
            except WrongState:
                raise ApiError(
                    "no engine behind this router is up", status=503, kind="Service Unavailable"
                ) from None
            except PolicyError as error:
                raise ApiError(str(error), status=500, kind="InternalServerError") from error
            finally:
                self._dispatcher.ended(row)
            if tried > len(self._workers.ranks):
                raise ApiError("no engine could be reached", status=503, kind="Service Unavailable")
            self.counts["retried"] += 1
            asked = asked._replace(row=self._dispatcher.next_row())

    async def _asked(self, request: Request) -> LiveRouteRequest:
        tokens, output, blocks = len(request.body) // 5, 0, self._no_blocks
        size = self._workers.block_size or 16
        if self._dispatcher.wants_blocks:
            up = self._workers.any_up()
            prompt = await self._prompts.read(read_json(request), up.upstream)
            if prompt is None:
                self.counts["untokenized"] += 1
            else:
                tokens, output = len(prompt.tokens), prompt.output_tokens
                blocks = prompt.blocks(size, up.adapters)
        session = request.headers.get("x-session-id") or request.headers.get("x-session-affinity")
        parent = request.headers.get("x-parent-session-id")
        return LiveRouteRequest(
            self._dispatcher.next_row(),
            time.monotonic_ns(),
            tokens,
            output,
            0,
            size,
            blocks,
            None if session is None else xxh3_64(session.encode()),
            None if parent is None else xxh3_64(parent.encode()),
        )

    async def _send(
        self,
        request: Request,
        connection: Connection,
        rank: Rank,
        asked: LiveRouteRequest,
        decision: Decision,
        *,
        is_last: bool,
    ) -> bool:
        """Forward a request. False: the engine cannot be reached, and no byte was sent to it or to the client.

        Unless this is the last engine to try: EngineFailed where it fails before the first byte of an answer's body.
        """
        headers = forwarded_headers(request)
        if len(rank.worker.ranks) > 1:
            headers.setdefault("x-data-parallel-rank", str(rank.rank))
        sent_s = time.monotonic()
        try:
            answer = await rank.worker.upstream.ask(
                request.method, request.head.target, request.body, headers
            )
        except Unreachable as error:
            self._workers.down(rank.worker, str(error))
            return False
        except OutOfFiles as error:
            self._workers.close_idle()
            raise _api_error(error) from error
        except UpstreamError as error:
            # The request may have caused the failure: it goes to another engine only if that was asked for.
            await self._workers.check(rank.worker)
            if not is_last:
                raise EngineFailed(rank.worker, _api_error(error)) from error
            raise _api_error(error) from error
        if answer.status >= 500:  # a dead engine answers quickly, and would attract more requests
            self._begin(self._workers.check(rank.worker))
            if not is_last:
                answer.close()
                said = f"{rank.worker.upstream.url} answered with status {answer.status}"
                raise EngineFailed(rank.worker, ApiError(said, status=502, kind="Bad Gateway"))
        overlap = decision.overlap_blocks
        more = _passed_on(
            [
                *(field for field in answer.head.fields if not field[0].startswith("x-understudy-")),
                ("x-understudy-worker", str(rank.number)),
                *([] if overlap is None else [("x-understudy-overlap-blocks", str(overlap))]),
            ]
        )
        began = False
        try:
            if answer.has_length:
                body = await answer.body()
                self._dispatcher.first_token(asked.row)
                began = True
                connection.respond(answer.status, body, answer.headers.get("content-type", ""), more)
            else:
                kind = answer.headers.get("content-type", "")
                if is_last:
                    connection.start_stream(more, status=answer.status, content_type=kind)
                async for part in answer.chunks():
                    if not began:
                        began = True
                        self._dispatcher.first_token(asked.row)
                        if not is_last:
                            connection.start_stream(more, status=answer.status, content_type=kind)
                    connection.send_event(part)
                    self._outbox.flush()
                    if connection.ends:
                        await asyncio.sleep(0)  # let the loop report that the client has disconnected
                if not began and not is_last:
                    connection.start_stream(more, status=answer.status, content_type=kind)
                connection.end_stream()
        except UpstreamError as error:
            if not began and not is_last:
                await self._workers.check(rank.worker)
                raise EngineFailed(rank.worker, _api_error(error)) from error
            if not answer.has_length:
                self._break_off(connection, error, answer.headers.get("content-type", ""))
            await self._workers.check(rank.worker)
            if answer.has_length:
                raise _api_error(error) from error
            return True
        except asyncio.CancelledError:
            answer.close()
            raise
        if answer.status == 200 and len(asked.prompt_blocks) > (overlap or 0):
            rank.follower.expect(sent_s)
        return True

    def _break_off(self, connection: Connection, error: UpstreamError, content_type: str) -> None:
        """End a stream of events with an error; cut one that has no form for that."""
        if content_type.startswith("text/event-stream"):
            body = error_body(error.status, str(error), "InternalServerError")
            connection.send_event(b"data: " + body + b"\n\ndata: [DONE]\n\n")
            connection.end_stream()
        else:
            connection.drop()

    async def _pass_on(self, request: Request, connection: Connection) -> None:
        """Forward a request without routing, to the first engine that is up."""
        worker = self._workers.any_up()
        headers = forwarded_headers(request)
        try:
            answer = await worker.upstream.ask(request.method, request.head.target, request.body, headers)
            body = await answer.body()
        except UpstreamError as error:
            await self._workers.check(worker)
            raise _api_error(error) from error
        kind = answer.headers.get("content-type", "")
        length = whole_number(answer.headers.get("content-length", "")) if answer.bodyless else None
        connection.respond(answer.status, body, kind, _passed_on(answer.head.fields), length=length)


def _api_error(error: UpstreamError) -> ApiError:
    return ApiError(str(error), status=error.status, kind=error.kind)


def forwarded_headers(request: Request) -> dict[str, str]:
    """Return the headers to forward to an engine: all but those of the client's connection."""
    return {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}


def _passed_on(fields: list[tuple[str, str]]) -> bytes:
    """Build the header lines to forward to the client: all but those of the engine's connection."""
    lines = (f"{name}: {value}\r\n" for name, value in fields if name not in _ANSWERS_OWN_HEADERS)
    return "".join(lines).encode("latin-1", "replace")
