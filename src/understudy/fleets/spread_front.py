"""Page and fault orders of a fleet over several processes: combines the reports of the groups."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.fleets.assets import show_page
from understudy.fleets.front import route_of
from understudy.fleets.monitor import SAMPLED_EVERY_S, Monitor
from understudy.fleets.report import Report, join_reports
from understudy.proxy.upstream import UpstreamError
from understudy.server.api.errors import ApiError
from understudy.server.api.fields import read_json, whole_number
from understudy.server.faults import FaultOrder, chosen_workers
from understudy.server.metrics.families import CONTENT_TYPE
from understudy.server.metrics.merged import from_rows, merge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from understudy.http import Connection, Request
    from understudy.proxy.service import RouterService
    from understudy.proxy.upstream import Upstream
    from understudy.proxy.workers import Rank
    from understudy.router.dispatch import Decision, LiveRouteRequest
    from understudy.server.settings import ServerSettings


class SpreadFront:
    """Routes of the fleet at the router's port. `groups`: each group's front end and number of workers."""

    def __init__(
        self,
        groups: Sequence[tuple[Upstream, int]],
        pools: Sequence[tuple[int, ServerSettings]],
        routing: str,
        router: RouterService,
    ) -> None:
        self._groups = list(groups)
        self._settings = [pool for count, pool in pools for _ in range(count)]
        self._dispatcher = router.dispatcher
        self._ranks = router.workers
        self._registry = router.proxy.registry
        self.monitor = Monitor(pools, routing, lambda: router.dispatcher.num_waiting)
        self._sampler: asyncio.Task[None] | None = None
        self.routes: dict[str, dict[str, Callable[[Request, Connection], Awaitable[None]]]] = {
            "/": {"GET": self._show_page},
            "/page/": {"GET": self._show_page},
            "/metrics": {"GET": self._metrics, "HEAD": self._metrics},
            "/fleet/state": {"GET": self._state},
            "/fleet/events": {"GET": self._watch},
            "/fleet/workers/": {"GET": self._worker},
            "/admin/fault": {"GET": self._faults, "POST": self._order},
        }
        """Routes by path and method; a path that ends with a slash covers those below it."""

    async def answer(self, request: Request, connection: Connection) -> bool:
        """Answer a request to one of the fleet's paths. False for other paths."""
        own = self.routes.get(route_of(request.path), {}).get(request.method)
        if own is None:
            return False
        try:
            await own(request, connection)
        except UpstreamError as error:
            raise ApiError(str(error), status=502, kind="Bad Gateway") from error
        return True

    async def _show_page(self, request: Request, connection: Connection) -> None:
        show_page(request, connection)

    async def _metrics(self, _: Request, connection: Connection) -> None:
        """Send the router's own metrics and those of all engines, merged."""
        rows = await asyncio.gather(*(_read(front, "/fleet/metrics") for front, _ in self._groups))
        merged = merge(map(from_rows, rows))
        connection.respond(200, self._registry.render() + merged.render(), CONTENT_TYPE)

    def routed(self, request: Request, asked: LiveRouteRequest, decision: Decision, rank: Rank) -> None:
        """Keep a routing decision for the page."""
        worker, load = self._ranks.all.index(rank.worker), self._dispatcher.outstanding.requests[rank.number]
        self.monitor.decided(decision, asked, worker, request.path, load)

    async def report(self) -> Report:
        """Report on the workers of all groups, in order, with the greatest lateness of all processes."""
        reports = await asyncio.gather(*(_read(front, "/fleet/report") for front, _ in self._groups))
        return join_reports(msgspec.convert(reports, list[Report]))

    async def _state(self, _: Request, connection: Connection) -> None:
        connection.respond(200, msgspec.json.encode(self.monitor.state(await self.report())))

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

    # ── Samples ──

    async def _watch(self, _: Request, connection: Connection) -> None:
        self.monitor.watch(connection, await self.report())

    def start(self) -> None:
        """Sample the workers from now on."""
        self._sampler = asyncio.get_running_loop().create_task(self._sample())

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLED_EVERY_S)
            with suppress(UpstreamError):  # a group has ended, so the fleet ends soon
                self.monitor.sample(await self.report())

    def close(self) -> None:
        """Stop sampling and disconnect the watchers."""
        if self._sampler is not None:
            self._sampler.cancel()
            self._sampler = None
        self.monitor.close()
        for front, _ in self._groups:
            front.close()


async def _read(front: Upstream, path: str) -> Any:
    status, body = await front.get(path)
    if status != 200:
        raise UpstreamError(f"{front.url}{path} answers {status}")
    return msgspec.json.decode(body)
