"""A running standalone router."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from understudy.clock import WallClock
from understudy.http import Outbox, listen
from understudy.http.bodies import MAX_BODY_BYTES, MAX_BODY_DEPTH
from understudy.lateness import Lateness
from understudy.proxy.found_workers import FoundWorkers, NameService
from understudy.proxy.prompts import PromptReader
from understudy.proxy.proxy import Proxy
from understudy.proxy.upstream import TimeLimits
from understudy.proxy.workers import EngineAway, Workers
from understudy.router.dispatch import Dispatcher
from understudy.server.access import Access
from understudy.server.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from understudy._core import GroupLayout
    from understudy.proxy.address import WorkerAddress
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a standalone router."""

    workers: tuple[WorkerAddress, ...] = ()
    discover: tuple[NameService, ...] = ()
    """Name services that list engines, which come and go."""
    routing: str | KvRouting | Router = "kv"
    host: str = "127.0.0.1"
    port: int = 8080
    block_size: int | None = None
    """Tokens per block of the engines' caches; None: read from their /metrics."""
    kv_cache_groups: GroupLayout | None = None
    """Sizes of the engines' KV cache groups; None: learned from their events."""
    tokenizer: str | None = None
    """None: the engines tokenize (`/tokenize`); `builtin`, or a local Hugging Face directory."""
    max_num_batched_tokens: int = 8192
    """Prompt tokens in a step of an engine, for the queue's threshold."""
    silence_s: float = 5.0
    """Seconds without events, while it serves requests, after which an engine's view counts as incomplete."""
    look_every_s: float = 1.0
    awaits_workers: bool = False
    """True: retry engines that do not answer at the start. False: ConfigError."""
    seed: int = 0
    first_byte_timeout_s: float = 600.0
    """Seconds from sending a request to the first byte of the answer's body; 0: without limit."""
    stall_timeout_s: float = 300.0
    """Seconds without a byte in the middle of an answer; 0: without limit."""
    retries: int = 0
    """To how many more engines a request goes that one has failed before the first byte of an answer's body."""
    max_body_bytes: int = MAX_BODY_BYTES
    max_body_depth: int = MAX_BODY_DEPTH
    """Levels of lists and objects in a body."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients need; the first is also sent with the router's own requests to engines."""
    admin_hosts: tuple[str, ...] = ()
    """Addresses and networks whose clients may call control routes; without a key only."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of pages that may call control routes."""


class RouterService:
    """Listens on one port and routes to engines."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.dispatcher = Dispatcher(settings.routing, seed=settings.seed)
        self.workers = Workers(
            self.dispatcher,
            block_size=settings.block_size,
            batch_tokens=settings.max_num_batched_tokens,
            silence_s=settings.silence_s,
            look_every_s=settings.look_every_s,
            limits=TimeLimits(settings.first_byte_timeout_s, settings.stall_timeout_s),
            key=next(iter(settings.api_keys), None),
            groups=settings.kv_cache_groups,
        )
        self._found = FoundWorkers(self.workers, settings.discover)
        tokenizer = None if settings.tokenizer is None else open_tokenizer(settings.tokenizer)
        self._outbox = Outbox(WallClock(), Lateness())
        access = Access(
            keys=settings.api_keys,
            admin_hosts=settings.admin_hosts,
            origins=settings.allowed_origins,
            host=settings.host,
        )
        self.proxy = Proxy(
            self.workers,
            self.dispatcher,
            PromptReader(tokenizer),
            self._outbox,
            access,
            retries=settings.retries,
        )
        self.proxy.max_body_bytes = settings.max_body_bytes
        self.proxy.max_body_depth = settings.max_body_depth
        self._listening: asyncio.Server | None = None
        self.port = settings.port

    async def start(self) -> None:
        """Add the engines and listen. ConfigError when one cannot be used, OSError when the port is taken."""
        try:
            for address in self.settings.workers:
                try:
                    await self.workers.add(address)
                except EngineAway as error:
                    if not self.settings.awaits_workers:
                        raise
                    self.workers.expect(address, str(error))
            await self._found.start()
            self._listening = await listen(self.proxy, self._outbox, self.settings.host, self.settings.port)
        except BaseException:
            await self._found.close()
            await self.workers.close()
            raise
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self, drain_s: float = 0.0) -> None:
        """Stop listening and following; drain for `drain_s` seconds, then end the other answers with an error."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        await self._found.close()
        self.proxy.draining = True
        until_s = time.monotonic() + drain_s
        while time.monotonic() < until_s and (self.proxy.busy or self._outbox.sending):
            await asyncio.sleep(0.02)
        await self.proxy.close()
        await self._outbox.wait_until_sent()
        await self.workers.close()
