"""The page and the orders of a fleet over several processes: each group tells of its workers, and this adds up."""

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
from understudy.server.proxy.upstream import Upstream, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.router.dispatch import Decision, Dispatcher, LiveRouteRequest
    from understudy.server.http import Connection, Request
    from understudy.server.proxy.workers import Rank, Workers
    from understudy.server.settings import ServerSettings


class SpreadDoor:
    """Paths of the fleet at the router's port. `groups`: the port of each group's own door, and its workers' number."""

    def __init__(
        self,
        groups: Sequence[tuple[int, int]],
        workers: Sequence[ServerSettings],
        routing: str,
        dispatcher: Dispatcher,
        ranks: Workers,
    ) -> None:
        self._groups = [(Upstream(f"http://127.0.0.1:{port}"), count) for port, count in groups]
        self._settings = list(workers)
        self._routing = routing
        self._dispatcher = dispatcher
        self._ranks = ranks
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._watchers: set[Connection] = set()
        self._shower: asyncio.Task[None] | None = None
        self._page = files(__package__).joinpath("page.html").read_bytes()

    async def answer(self, request: Request, connection: Connection) -> bool:
        """True when the path is one of the fleet's."""
        path, method = request.path, request.method
        try:
            if path == "/" and method == "GET":
                connection.respond(200, self._page, "text/html; charset=utf-8")
            elif path == "/fleet/events" and method == "GET":
                await self._watch(connection)
            elif path == "/fleet/state" and method == "GET":
                connection.respond(200, msgspec.json.encode(await self.state()))
            elif path.startswith("/fleet/workers/") and method == "GET":
                connection.respond(200, msgspec.json.encode(await self._worker(path.rpartition("/")[2])))
            elif path == "/admin/fault" and method == "POST":
                order = FaultOrder.read(read_json(request))
                connection.respond(200, msgspec.json.encode(await self._order(order)))
            else:
                return False
        except UpstreamError as error:
            raise ApiError(str(error), status=502, kind="Bad Gateway") from error
        return True

    def routed(self, request: Request, asked: LiveRouteRequest, decision: Decision, rank: Rank) -> None:
        """A request goes to a worker."""
        worker, load = self._ranks.all.index(rank.worker), self._dispatcher.outstanding.requests[rank.number]
        self._decisions.append(in_numbers(decision, asked, worker, request.path, self._routing, load))

    async def state(self) -> dict[str, Any]:
        """As the page of one process has it: workers in order, and the lateness of the latest process."""
        told = await asyncio.gather(*(_read(door, "/fleet/state") for door, _ in self._groups))
        columns = {
            name: [value for group in told for value in group["workers"][name]] for name in told[0]["workers"]
        }
        return {
            "workers": columns,
            "ports": [port for group in told for port in group["ports"]],
            "routing": self._routing,
            "queued": self._dispatcher.num_waiting,
            "late_ms": {name: max(group["late_ms"][name] for group in told) for name in told[0]["late_ms"]},
            "decisions": list(self._decisions)[-SHOWN_DECISIONS:],
        }

    async def _worker(self, name: str) -> dict[str, Any]:
        number = whole_number(name)
        if number is None or not 0 <= number < len(self._settings):
            raise ApiError(
                f"there are workers 0 … {len(self._settings) - 1}", status=404, kind="NotFoundError"
            )
        left = number
        for door, count in self._groups:
            if left < count:
                return {**await _read(door, f"/fleet/workers/{left}"), "worker": number}
            left -= count
        raise AssertionError("every worker is in a group")

    async def _order(self, order: FaultOrder) -> dict[str, Any]:
        """An order for some workers, or all, wherever they are. Nothing has happened when it is refused."""
        chosen = chosen_workers(order, self._settings)
        first = lost = 0
        for door, count in self._groups:
            here = [index - first for index in chosen if first <= index < first + count]
            first += count
            if here:
                body = msgspec.json.encode(msgspec.structs.replace(order, workers=here))
                status, answer = await door.post("/admin/fault", body)
                if status != 200:
                    raise UpstreamError(f"{door.url} refused a fault: {answer[:200]!r}")
                lost += msgspec.json.decode(answer)["lost_requests"]
        return {"fault": order.kind, "workers": chosen, "lost_requests": lost}

    # ── Who watches ──

    async def _watch(self, connection: Connection) -> None:
        data = _event(await self.state())
        connection.start_stream(b"cache-control: no-store\r\n")
        self._watchers.add(connection)
        connection.on_close = lambda: self._watchers.discard(connection)
        connection.send_event(data)
        connection.flush()
        if self._shower is None or self._shower.done():
            self._shower = asyncio.get_running_loop().create_task(self._show())

    async def _show(self) -> None:
        """Tell all that watch; nobody watches, nothing happens."""
        while self._watchers:
            await asyncio.sleep(SHOWN_EVERY_S)
            try:
                data = _event(await self.state())
            except UpstreamError:  # a group is gone, and the fleet with it soon
                continue
            for watcher in list(self._watchers):
                watcher.send_event(data)
                watcher.flush()

    def close(self) -> None:
        """Send the watchers away."""
        if self._shower is not None:
            self._shower.cancel()
            self._shower = None
        for watcher in list(self._watchers):
            watcher.drop()
        for door, _ in self._groups:
            door.close()


async def _read(door: Upstream, path: str) -> Any:
    status, body = await door.get(path)
    if status != 200:
        raise UpstreamError(f"{door.url}{path} answers {status}")
    return msgspec.json.decode(body)


def _event(state: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(state) + b"\n\n"
