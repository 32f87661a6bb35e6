"""Page and fault orders of a fleet over several processes: combines the reports of the groups."""

from __future__ import annotations

import asyncio
from collections import deque
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.api.errors import ApiError
from understudy.server.api.fields import read_json, whole_number
from understudy.server.faults import FaultOrder, chosen_workers
from understudy.server.fleet.front import KEPT_DECISIONS, SHOWN_DECISIONS, SHOWN_EVERY_S, in_numbers
from understudy.server.proxy.upstream import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from understudy.router.dispatch import Decision, Dispatcher, LiveRouteRequest
    from understudy.server.http import Connection, Request
    from understudy.server.proxy.upstream import Upstream
    from understudy.server.proxy.workers import Rank, Workers
    from understudy.server.settings import ServerSettings


class SpreadFront:
    """Routes of the fleet at the router's port. `groups`: each group's front end and number of workers."""

    def __init__(
        self,
        groups: Sequence[tuple[Upstream, int]],
        workers: Sequence[ServerSettings],
        routing: str,
        dispatcher: Dispatcher,
        ranks: Workers,
    ) -> None:
        self._groups = list(groups)
        self._settings = list(workers)
        self._routing = routing
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._watchers: set[Connection] = set()
        self._shower: asyncio.Task[None] | None = None
        self._page = files(__package__).joinpath("page.html").read_bytes()

        self.routes: dict[str, dict[str, Callable[[Request, Connection], Awaitable[None]]]] = {
            "/": {"GET": self._show_page},
            "/fleet/state": {"GET": self._state},
            "/fleet/events": {"GET": self._watch},
            "/fleet/workers/": {"GET": self._worker},
            "/admin/fault": {"GET": self._faults, "POST": self._order},
        }
        """Routes by path and method; a path that ends with a slash covers those below it."""

    async def answer(self, request: Request, connection: Connection) -> bool:
        """Answer a request to one of the fleet's paths. False for other paths."""
        below = "/fleet/workers/"
        path = below if request.path.startswith(below) else request.path
        own = self.routes.get(path, {}).get(request.method)
        if own is None:
            return False
        try:
            await own(request, connection)
        except UpstreamError as error:
            raise ApiError(str(error), status=502, kind="Bad Gateway") from error
        return True

    async def _show_page(self, _: Request, connection: Connection) -> None:
        connection.respond(200, self._page, "text/html; charset=utf-8")

    def routed(self, request: Request, asked: LiveRouteRequest, decision: Decision, rank: Rank) -> None:
        """Keep a routing decision for the page."""
        worker, load = self._ranks.all.index(rank.worker), self._dispatcher.outstanding.requests[rank.number]
        self._decisions.append(in_numbers(decision, asked, worker, request.path, self._routing, load))

    async def _state(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(await self.state()))

    async def state(self) -> dict[str, Any]:
        """Return the state of all workers in order, with the greatest lateness of all processes."""
        states = await asyncio.gather(*(_read(front, "/fleet/state") for front, _ in self._groups))
        columns = {
            name: [value for group in states for value in group["workers"][name]]
            for name in states[0]["workers"]
        }
        return {
            "workers": columns,
            "ports": [port for group in states for port in group["ports"]],
            "routing": self._routing,
            "queued": self._dispatcher.num_waiting,
            "late_ms": {
                name: max(group["late_ms"][name] for group in states) for name in states[0]["late_ms"]
            },
            "decisions": list(self._decisions)[-SHOWN_DECISIONS:],
        }

    async def _worker(self, request: Request, connection: Connection) -> None:
        number = whole_number(request.path.rpartition("/")[2])
        if number is None or not 0 <= number < len(self._settings):
            raise ApiError(
                f"there are workers 0 … {len(self._settings) - 1}", status=404, kind="NotFoundError"
            )
        left = number
        for front, count in self._groups:
            if 0 <= left < count:
                state = {**await _read(front, f"/fleet/workers/{left}"), "worker": number}
                connection.respond(200, msgspec.json.encode(state))
            left -= count

    async def _faults(self, _: Request, connection: Connection) -> None:
        rows, first = [], 0
        for front, count in self._groups:
            faults = (await _read(front, "/admin/fault"))["faults"]
            rows += [{**row, "worker": first + row["worker"]} for row in faults]
            first += count
        connection.respond(200, msgspec.json.encode({"faults": rows}))

    async def _order(self, request: Request, connection: Connection) -> None:
        """Forward an order to the groups of its workers. Nothing has changed when it is invalid."""
        order = FaultOrder.read(read_json(request))
        chosen = chosen_workers(order, self._settings)
        first = lost = 0
        for front, count in self._groups:
            here = [index - first for index in chosen if first <= index < first + count]
            first += count
            if here:
                body = msgspec.json.encode(msgspec.structs.replace(order, workers=here))
                status, answer = await front.post("/admin/fault", body)
                if status != 200:
                    raise UpstreamError(f"{front.url} refused a fault: {answer[:200]!r}")
                lost += msgspec.json.decode(answer)["lost_requests"]
        report = {"fault": order.kind, "workers": chosen, "lost_requests": lost}
        connection.respond(200, msgspec.json.encode(report))

    # ── Watchers ──

    async def _watch(self, _: Request, connection: Connection) -> None:
        data = _event(await self.state())
        connection.start_stream(b"cache-control: no-store\r\n")
        self._watchers.add(connection)
        connection.on_close = lambda: self._watchers.discard(connection)
        connection.send_event(data)
        connection.flush()
        if self._shower is None or self._shower.done():
            self._shower = asyncio.get_running_loop().create_task(self._show())

    async def _show(self) -> None:
        """Send the state to all watchers; stop when there is none."""
        while self._watchers:
            await asyncio.sleep(SHOWN_EVERY_S)
            try:
                data = _event(await self.state())
            except UpstreamError:  # a group has ended, so the fleet ends soon
                continue
            for watcher in list(self._watchers):
                watcher.send_event(data)
                watcher.flush()

    def close(self) -> None:
        """Disconnect the watchers."""
        if self._shower is not None:
            self._shower.cancel()
            self._shower = None
        for watcher in list(self._watchers):
            watcher.drop()
        for front, _ in self._groups:
            front.close()


async def _read(front: Upstream, path: str) -> Any:
    status, body = await front.get(path)
    if status != 200:
        raise UpstreamError(f"{front.url}{path} answers {status}")
    return msgspec.json.decode(body)


def _event(state: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(state) + b"\n\n"
