"""Engines that a name service lists: registers those that appear and unregisters those that are gone."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from understudy.errors import ConfigError
from understudy.http import address_of
from understudy.proxy.address import WorkerAddress
from understudy.proxy.dns_srv import DnsError, query_srv
from understudy.proxy.endpoint_slices import ApiServer, SlicesError, read_slices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.proxy.workers import Workers

log = logging.getLogger("understudy.router")

LOOK_EVERY_S = 5.0
_FORMS = "srv:NAME (DNS) or endpointslices:NAMESPACE/SERVICE[:PORT] (Kubernetes)"


class NameService(Protocol):
    """Lists engines."""

    async def find(self) -> set[str]:
        """Return the URLs of all engines. DnsError or SlicesError if they cannot be listed now."""


@dataclass(frozen=True, slots=True)
class SrvName:
    """SRV records of a name, such as those of a headless service."""

    name: str
    server: tuple[str, int] | None = None

    async def find(self) -> set[str]:
        """Return the URLs of the name's targets."""
        return {f"http://{address_of(host, port)}" for host, port in await query_srv(self.name, self.server)}


@dataclass(frozen=True, slots=True)
class Slices:
    """EndpointSlices of a Kubernetes service."""

    server: ApiServer
    namespace: str
    service: str
    port: str | None = None

    async def find(self) -> set[str]:
        """Return the URLs of the service's ready endpoints."""
        return await read_slices(self.server, self.namespace, self.service, self.port)


def read_name_service(text: str) -> NameService:
    """Read `--discover`. ConfigError for another form."""
    kind, _, rest = text.partition(":")
    if kind == "srv" and rest:
        return SrvName(rest)
    namespace, slash, service = rest.partition("/")
    if kind == "endpointslices" and namespace and slash and service:
        name, _, port = service.partition(":")
        return Slices(ApiServer.of_pod(), namespace, name, port or None)
    raise ConfigError(f"--discover: {text!r} is not known; write {_FORMS}")


class FoundWorkers:
    """Keeps a router's engines equal to those that a name service lists; others stay as they are."""

    def __init__(
        self, workers: Workers, services: Iterable[NameService], every_s: float = LOOK_EVERY_S
    ) -> None:
        self._workers, self._services, self._every_s = workers, tuple(services), every_s
        self._found: dict[NameService, set[str]] = {}
        self._problems: dict[NameService, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then go on looking."""
        if self._services:
            await self.look()
            self._task = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Register new engines and unregister those that are no longer listed; a failed look changes nothing."""
        for service in self._services:
            try:
                found = await service.find()
            except (DnsError, SlicesError) as error:
                if self._problems.get(service) != str(error):
                    log.warning("engines cannot be listed, those known are kept: %s", error)
                self._problems[service] = str(error)
                continue
            self._problems.pop(service, None)
            before = self._found.get(service, set())
            self._found[service] = found
            others: set[str] = set().union(*(urls for one, urls in self._found.items() if one != service))
            for url in sorted(found - before - others):
                self._workers.expect(WorkerAddress(url=url), "it was listed just now")
            for url in sorted(before - found - others):
                log.info("%s is no longer listed", url)
                try:
                    self._workers.remove(url)
                except ConfigError:
                    continue  # unregistered by hand

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
