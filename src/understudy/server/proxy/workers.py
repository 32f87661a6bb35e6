"""The engines behind a standalone router: found, followed, watched."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError
from understudy.server.api.fields import whole_number
from understudy.server.proxy.follower import ASSUMED, MEANING, EventSource, Follower
from understudy.server.proxy.upstream import NO_LIMITS, OutOfFiles, TimeLimits, Upstream, UpstreamError

if TYPE_CHECKING:
    from understudy.router.dispatch import Dispatcher

log = logging.getLogger("understudy.router")

_LABEL = re.compile(r'^vllm:cache_config_info\{[^}]*?\bblock_size="(\d+)"', re.MULTILINE)
_WILD = ("*", "0.0.0.0", "[::]", "::", "")


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: its URL, and where it publishes, unless it says so itself (`/kv_event_sources`, vLLM 0.32)."""

    url: str
    events: str | None = None
    replay: str | None = None
    topic: str | None = None

    @classmethod
    def parse(cls, text: str) -> WorkerAddress:
        """`URL`, `URL=EVENTS` or `URL=EVENTS+REPLAY`."""
        url, _, rest = text.partition("=")
        events, _, replay = rest.partition("+")
        return cls(url=url, events=events or None, replay=replay or None)


class EngineAway(ConfigError):
    """An engine that does not answer, or is not ready: it may come."""


class Rank:
    """One engine behind a URL: a place that the policy can choose."""

    def __init__(self, worker: ProxyWorker, rank: int, number: int, follower: Follower) -> None:
        self.worker = worker
        self.rank = rank
        self.number = number
        self.follower = follower
        self.routed = 0


class ProxyWorker:
    """A URL and its ranks."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.ranks: list[Rank] = []
        self.up = True
        self.gone = False
        self.why_down = ""
        self.adapters: set[str] = set()


class Workers:
    """All engines of one router."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        block_size: int | None = None,
        batch_tokens: int = 8192,
        silence_s: float = 5.0,
        look_every_s: float = 1.0,
        limits: TimeLimits = NO_LIMITS,
        key: str | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._key = key
        self.block_size = block_size
        self.all: list[ProxyWorker] = []
        self.ranks: list[Rank] = []
        """By the number that the policy knows."""
        self.awaited: dict[WorkerAddress, str] = {}
        """Engines that were named and are not there yet, and why not."""
        self._batch_tokens = batch_tokens
        self._silence_s = silence_s
        self._look_every_s = look_every_s
        self._limits = limits
        self._watcher: asyncio.Task[None] | None = None

    # ── Who is there ──

    async def add(self, address: WorkerAddress) -> ProxyWorker:
        """Find out what an engine is, and follow it. ConfigError when that cannot be, EngineAway when it may yet."""
        upstream = Upstream(address.url, self._limits, self._key)
        self._refuse_twice(upstream)
        numbers: list[int] = []
        try:
            await self._require_ready(upstream)
            sources = await self._sources(upstream, address)
            await self._agree_on_blocks(upstream)
            adapters = await self._adapters(upstream)
            self._refuse_twice(upstream)  # somebody else may have named it meanwhile
            followers = self._follow(sources, numbers)
        except UpstreamError as error:
            upstream.close()
            raise EngineAway(str(error)) from error
        except ConfigError:
            upstream.close()
            raise
        worker = ProxyWorker(upstream)
        worker.adapters = adapters
        for rank, follower in enumerate(followers):  # nothing is refused from here on: numbers are for good
            number = self.dispatcher.add_worker(self._batch_tokens)
            numbers.append(number)
            self.dispatcher.set_degraded(number, True)  # until it has been heard
            worker.ranks.append(Rank(worker, rank, number, follower))
            self.ranks.append(worker.ranks[-1])
        self.all.append(worker)
        self.awaited = {
            one: why for one, why in self.awaited.items() if Upstream(one.url).url != upstream.url
        }
        self._begin_watching()
        return worker

    def _refuse_twice(self, upstream: Upstream) -> None:
        if any(one.upstream.url == upstream.url and not one.gone for one in self.all):
            raise ConfigError(f"{upstream.url} is registered already")

    def _follow(self, sources: list[EventSource | None], numbers: list[int]) -> list[Follower]:
        """Who follows each rank, by the numbers that they get later. ConfigError when one cannot be; then none is."""
        followers: list[Follower] = []
        loop = asyncio.get_running_loop()
        try:
            for rank, source in enumerate(sources):

                def apply(columns: Any, rank: int = rank) -> None:
                    self.dispatcher.observe_columns(numbers[rank], columns)

                heard = source if self.dispatcher.wants_events else None
                followers.append(Follower(heard, apply, loop, silence_s=self._silence_s))
        except ConfigError:
            for follower in followers:
                follower.close()
            raise
        return followers

    def expect(self, address: WorkerAddress, why: str) -> None:
        """It is asked again and again, and added when it answers."""
        log.warning("%s is awaited: %s", address.url, why)
        self.awaited[address] = why
        self._begin_watching()

    def remove(self, url: str) -> None:
        """It gets no more requests, and its cache is forgotten. ConfigError when it is not there."""
        wanted = Upstream(url).url
        for address in self.awaited:
            if Upstream(address.url).url == wanted:
                del self.awaited[address]
                return
        for worker in self.all:
            if worker.upstream.url == wanted and not worker.gone:
                worker.gone, worker.up = True, False
                self._tell(worker)
                for rank in worker.ranks:
                    rank.follower.close()
                    self.dispatcher.forget(rank.number)
                worker.upstream.close()
                return
        raise ConfigError(f"{wanted} is not registered")

    def any_up(self) -> ProxyWorker:
        """The first engine that is up; ApiError 503 when none is."""
        for worker in self.all:
            if worker.up:
                return worker
        raise ApiError("no engine behind this router is up", status=503, kind="Service Unavailable")

    def down(self, worker: ProxyWorker, why: str) -> None:
        """It did not answer: nothing is sent there until it is healthy."""
        if worker.up:
            log.warning("%s is down: %s; others get its requests", worker.upstream.url, why)
        worker.up, worker.why_down = False, why
        self._tell(worker)

    def close_idle(self) -> None:
        """Close connections that no request uses, to have their files."""
        for worker in self.all:
            worker.upstream.close_idle()

    def _tell(self, worker: ProxyWorker) -> None:
        for rank in worker.ranks:
            self.dispatcher.set_available(rank.number, worker.up and not worker.gone)

    async def close(self) -> None:
        """Stop watching and following."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        for worker in self.all:
            for rank in worker.ranks:
                rank.follower.close()
            worker.upstream.close()
        await asyncio.sleep(0)  # so that connections are closed when this returns

    # ── How they are ──

    def _begin_watching(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look()
            await asyncio.gather(*(self.check(worker) for worker in self.all if not worker.gone))
            for address in tuple(self.awaited):  # one by one: the first that comes says the block size
                await self._ask_for(address)

    async def _ask_for(self, address: WorkerAddress) -> None:
        try:
            worker = await self.add(address)
        except ConfigError as error:
            if address in self.awaited:  # else it was unregistered meanwhile
                if not isinstance(error, EngineAway) and str(error) != self.awaited[address]:
                    log.warning("%s is there and cannot be taken: %s", address.url, error)
                self.awaited[address] = str(error)
        else:
            log.info("%s has come: %d ranks", worker.upstream.url, len(worker.ranks))

    def look(self) -> None:
        """What the events of each can be trusted for."""
        for rank in self.ranks:
            if rank.worker.gone:
                continue
            before = rank.follower.health
            health = rank.follower.look()
            self.dispatcher.set_degraded(rank.number, rank.follower.degraded)
            if health != before:
                name = f"{rank.worker.upstream.url} rank {rank.rank}"
                if health == "live" and before == "waiting":
                    log.info("view of %s: whole", name)
                elif health == "live":
                    log.warning("view of %s: whole again; what was assumed is forgotten", name)
                else:
                    log.warning("view of %s: %s (%s); %s", name, health, MEANING[health], ASSUMED)
                if health == "conflict":
                    self.dispatcher.forget(rank.number)

    async def check(self, worker: ProxyWorker) -> None:
        """Ask it how it is."""
        try:
            status, _ = await worker.upstream.get("/health")
        except OutOfFiles:
            self.close_idle()
            return
        except UpstreamError as error:
            self.down(worker, str(error))
            return
        if status != 200:
            self.down(worker, f"/health says {status}")
        elif not worker.up and not worker.gone:
            log.warning("%s is up again", worker.upstream.url)
            worker.up, worker.why_down = True, ""
            self._tell(worker)

    # ── What they say of themselves ──

    async def _require_ready(self, upstream: Upstream) -> None:
        """While it loads, an engine may answer and know nothing of itself yet."""
        status, _ = await upstream.get("/health")
        if status != 200:
            raise UpstreamError(f"{upstream.url}/health says {status}")

    async def _sources(self, upstream: Upstream, address: WorkerAddress) -> list[EventSource | None]:
        if address.events is not None:
            return [EventSource(address.events, address.replay, address.topic)]
        status, body = await upstream.get("/kv_event_sources")
        if status != 200:  # before vLLM 0.32
            return [None]
        try:
            told = msgspec.json.decode(body, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError:
            raise UpstreamError(f"{upstream.url}/kv_event_sources is not what vLLM says there") from None
        sources: list[EventSource | None] = []
        for rank in sorted(told, key=lambda name: whole_number(name) or 0):
            config = told[rank]
            if not config.get("endpoint") or config.get("enable_kv_cache_events") is False:
                sources.append(None)
                continue
            sources.append(
                EventSource(
                    _reachable(str(config["endpoint"]), upstream.host),
                    None
                    if not config.get("replay_endpoint")
                    else _reachable(config["replay_endpoint"], upstream.host),
                    config.get("topic") or None,
                )
            )
        return sources or [None]

    async def _agree_on_blocks(self, upstream: Upstream) -> None:
        """An index holds blocks of one size."""
        status, page = await upstream.get("/metrics")
        found = _LABEL.search(page.decode("utf-8", "replace")) if status == 200 else None
        size = None if found is None else int(found[1])
        if self.block_size is None:
            if size is None:
                raise ConfigError(
                    f"{upstream.url} does not say its block size on /metrics: give --block-size"
                )
            self.block_size = size
        elif size is not None and size != self.block_size:
            raise ConfigError(
                f"{upstream.url} has blocks of {size} tokens, this router those of {self.block_size}"
            )

    async def _adapters(self, upstream: Upstream) -> set[str]:
        status, body = await upstream.get("/v1/models")
        if status == 401:
            log.warning("%s/v1/models: needs a key; give the router the engine's --api-key", upstream.url)
        if status != 200:
            return set()
        try:
            cards = msgspec.json.decode(body)["data"]
            return {str(card["id"]) for card in cards if card.get("parent")}
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            return set()


def _reachable(endpoint: str, host: str) -> str:
    """Where a publisher that binds `tcp://*:5557` is found from here."""
    scheme, _, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    return f"{scheme}://{host}:{port}" if colon and scheme == "tcp" and name in _WILD else endpoint
