"""The engines behind a standalone router: registration, events, health checks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from understudy.engines.group_layouts import layout_of_labels
from understudy.errors import ConfigError
from understudy.events.group_reader import GroupReader, LearningReader
from understudy.proxy.discovery import (
    read_adapters,
    read_block_size,
    read_event_sources,
    require_ready,
)
from understudy.proxy.follower import ASSUMED, MEANING, EventSource, Follower
from understudy.proxy.upstream import NO_LIMITS, OutOfFiles, TimeLimits, Upstream, UpstreamError
from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from understudy._core import GroupLayout
    from understudy.events.group_reader import GroupLabel
    from understudy.proxy.address import WorkerAddress
    from understudy.proxy.follower import Health
    from understudy.router.dispatch import Dispatcher

log = logging.getLogger("understudy.router")


class EngineAway(ConfigError):
    """An engine that does not answer or is not ready; a retry may succeed."""


class Rank:
    """One engine behind a URL: a target of the policy."""

    def __init__(
        self, worker: ProxyWorker, rank: int, number: int, follower: Follower, *, has_groups: bool = False
    ) -> None:
        self.worker = worker
        self.rank = rank
        self.number = number
        self.follower = follower
        self.routed = 0
        self.has_groups = has_groups
        """Whether its KV cache has several groups, as far as is known."""


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
        groups: GroupLayout | None = None,
    ) -> None:
        """Make a router's list of engines. `groups`: of their KV caches; None: learned from their events."""
        self.dispatcher = dispatcher
        self._key = key
        self._groups = groups
        self.block_size = block_size if groups is None else groups.hash_block_size
        self.all: list[ProxyWorker] = []
        self.ranks: list[Rank] = []
        """Ranks by the policy's worker number, also by a former one."""
        self.awaited: dict[WorkerAddress, str] = {}
        """Engines that do not answer yet, with the error."""
        self._batch_tokens = batch_tokens
        self._silence_s = silence_s
        self._look_every_s = look_every_s
        self._limits = limits
        self._watcher: asyncio.Task[None] | None = None

    # ── Registration ──

    async def add(self, address: WorkerAddress) -> ProxyWorker:
        """Register an engine and follow its events. ConfigError when it is unusable, EngineAway when not ready."""
        upstream = Upstream(address.url, self._limits, self._key)
        self._refuse_twice(upstream)
        numbers: list[int] = []
        try:
            await require_ready(upstream)
            sources = await read_event_sources(upstream, address)
            await self._agree_on_blocks(upstream)
            adapters = await read_adapters(upstream)
            self._refuse_twice(upstream)  # another call may have registered it meanwhile
            worker = ProxyWorker(upstream)
            followers = self._follow(sources, numbers, worker)
        except UpstreamError as error:
            upstream.close()
            raise EngineAway(str(error)) from error
        except ConfigError:
            upstream.close()
            raise
        worker.adapters = adapters
        for rank, follower in enumerate(followers):  # no error from here on: numbers are permanent
            number = self.dispatcher.add_worker(self._batch_tokens, self._groups)
            numbers.append(number)
            self.dispatcher.set_degraded(number, follower.degraded)  # until its first event
            worker.ranks.append(Rank(worker, rank, number, follower, has_groups=self._groups is not None))
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

    async def _agree_on_blocks(self, upstream: Upstream) -> None:
        """Check that all engines have one block size. ConfigError otherwise."""
        size = await read_block_size(upstream)
        if self.block_size is None:
            if size is None:
                raise ConfigError(
                    f"{upstream.url} does not say its block size on /metrics: give --block-size"
                )
            self.block_size = size
        elif self._groups is not None:
            if size not in (None, self._groups.block_size):
                raise ConfigError(
                    f"{upstream.url} has blocks of {size} tokens, --kv-cache-groups those of "
                    f"{self._groups.block_size}"
                )
        elif size is not None and size != self.block_size:
            raise ConfigError(
                f"{upstream.url} has blocks of {size} tokens, this router those of {self.block_size}"
            )

    def _follow(
        self, sources: list[EventSource | None], numbers: list[int], worker: ProxyWorker
    ) -> list[Follower]:
        """Make a follower per rank; `numbers` is filled later. ConfigError when one fails; then none is left."""
        followers: list[Follower] = []
        loop = asyncio.get_running_loop()
        try:
            for rank, source in enumerate(sources):

                def apply(columns: Any, rank: int = rank) -> None:
                    self.dispatcher.observe_columns(numbers[rank], columns)

                def on_groups(labels: list[GroupLabel], rank: int = rank) -> None:
                    numbers[rank] = self._renumber(worker.ranks[rank], layout_of_labels(labels))

                followed: EventSource | Health = (
                    (source or "none") if self.dispatcher.wants_events else "not_followed"
                )
                followers.append(
                    Follower(
                        followed,
                        apply,
                        loop,
                        silence_s=self._silence_s,
                        reader=self._make_reader(),
                        on_groups=on_groups,
                    )
                )
        except ConfigError:
            for follower in followers:
                follower.close()
            raise
        return followers

    def _make_reader(self) -> GroupReader | LearningReader | None:
        """Make the reader of a rank's messages; None: the policy reads the blocks of the first group."""
        if self.dispatcher.kv is None or self.block_size is None:
            return None
        if self._groups is not None:
            return GroupReader(self._groups.hash_block_size)
        return LearningReader(self.block_size)

    def _renumber(self, rank: Rank, groups: GroupLayout) -> int:
        """Give a rank a new number in the policy, with these KV cache groups: those of a number are permanent.

        Requests that the rank has at this time count for its old number until they end.
        """
        number = self.dispatcher.add_worker(self._batch_tokens, groups)
        self.dispatcher.set_degraded(number, rank.follower.degraded)
        self.dispatcher.set_available(rank.number, False)
        self.dispatcher.forget(rank.number)
        rank.number, rank.has_groups = number, True
        self.ranks.append(rank)
        self._update_availability(rank.worker)
        log.info("%s rank %d has several KV cache groups", rank.worker.upstream.url, rank.rank)
        return number

    @property
    def each_rank(self) -> list[Rank]:
        """Ranks of the registered engines, each once."""
        return [rank for worker in self.all if not worker.gone for rank in worker.ranks]

    def expect(self, address: WorkerAddress, why: str) -> None:
        """Retry an engine periodically, and add it when it answers."""
        log.warning("%s is awaited: %s", address.url, why)
        self.awaited[address] = why
        self._begin_watching()

    def remove(self, url: str) -> None:
        """Unregister an engine and drop its blocks from the index. ConfigError when it is not registered."""
        wanted = Upstream(url).url
        for address in self.awaited:
            if Upstream(address.url).url == wanted:
                del self.awaited[address]
                return
        for worker in self.all:
            if worker.upstream.url == wanted and not worker.gone:
                worker.gone, worker.up = True, False
                self._update_availability(worker)
                for rank in worker.ranks:
                    rank.follower.close()
                    self.dispatcher.forget(rank.number)
                worker.upstream.close()
                return
        raise ConfigError(f"{wanted} is not registered")

    def any_up(self) -> ProxyWorker:
        """Return the first engine that is up. ApiError 503 when none is."""
        for worker in self.all:
            if worker.up:
                return worker
        raise ApiError("no engine behind this router is up", status=503, kind="Service Unavailable")

    def down(self, worker: ProxyWorker, why: str) -> None:
        """Mark an engine as down; no request is sent there until it is healthy."""
        if worker.up:
            log.warning("%s is down: %s; others get its requests", worker.upstream.url, why)
        worker.up, worker.why_down = False, why
        self._update_availability(worker)

    def close_idle(self) -> None:
        """Close connections that no request uses, to have their files."""
        for worker in self.all:
            worker.upstream.close_idle()

    def _update_availability(self, worker: ProxyWorker) -> None:
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

    # ── Health ──

    def _begin_watching(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            self.look()
            await asyncio.gather(*(self.check(worker) for worker in self.all if not worker.gone))
            for address in tuple(self.awaited):  # one by one: the first one sets the block size
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
        """Update the health of all views, and report changes to the log and the dispatcher."""
        for rank in self.each_rank:
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
        """Read an engine's /health and mark it up or down."""
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
            self._update_availability(worker)
