"""The decode side: finds the prefill servers that requests name, and connects to them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from understudy.server.push.bootstrap import BootstrapClient
from understudy.server.push.channel import Channel, News

if TYPE_CHECKING:
    from understudy.server.push.bootstrap import PrefillInfo
    from understudy.server.push.settings import Bootstrap
    from understudy.server.push.side import Side

log = logging.getLogger("understudy.server")

ATTEMPTS = 15
"""Attempts to find a prefill server, one a second, before its requests fail."""
MAX_PEERS = 1024
_BROKEN = (msgspec.MsgspecError, ValueError, OSError, TimeoutError, asyncio.IncompleteReadError)


class DecodePeers:
    """The prefill servers of a decode server, by the address of their bootstrap servers."""

    def __init__(self, network: Side) -> None:
        self._network = network
        self._peers: dict[tuple[str, int], FarPrefill] = {}
        self._by_number: dict[int, FarPrefill] = {}

    def find(self, bootstrap: Bootstrap, engine_id: int) -> tuple[int, bool]:
        """Return the number of a request's prefill server, and whether it is known; else look for it."""
        address = (bootstrap.host, bootstrap.port)
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = self._make_peer(BootstrapClient(*address))
        if not peer.is_known:
            peer.look_for(engine_id)
        return peer.number, peer.is_known

    def _make_peer(self, client: BootstrapClient) -> FarPrefill:
        number = -1
        if len(self._peers) >= MAX_PEERS:  # one that is not there gives its place to another
            for address, peer in self._peers.items():
                if peer.is_idle:
                    number = peer.number
                    del self._peers[address]
                    break
        if number < 0:
            number = self._network.net.add_worker(produces=True, consumes=False, far=True)
            self._network.pushes.set_far(number)
        made = self._by_number[number] = FarPrefill(self._network, client, number)
        return made

    def send(self, worker: int, news: News) -> None:
        """Send news to a prefill server."""
        peer = self._by_number.get(worker)
        if peer is not None and peer.channel is not None:
            peer.channel.send(news)

    async def close(self) -> None:
        """Disconnect from all prefill servers."""
        for peer in self._peers.values():
            await peer.close()


class FarPrefill:
    """A prefill server of another process."""

    def __init__(self, network: Side, client: BootstrapClient, number: int) -> None:
        self.number = number
        self.channel: Channel | None = None
        self.is_known = False
        """True once its bootstrap server has answered; heartbeats may end that."""
        self._network = network
        self._client = client
        self._waiting: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True when it is not known, and no attempt to find it goes on."""
        return not self.is_known and self._task is None

    def look_for(self, engine_id: int) -> None:
        """Begin to look for it; a request waits for that."""
        self._waiting.append(engine_id)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Disconnect."""
        tasks = [task for task in (self._task, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.channel is not None:
            self.channel.close()

    async def _run(self) -> None:
        """Find the server, then look at it at intervals until it is lost."""
        try:
            why = await self._connect()
            if why is not None:
                self._fail_waiting(why)
                return
            await self._watch()
        finally:
            self._task = None

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._network.driver.clock.speed)

    async def _connect(self) -> str | None:
        """Connect to it; return why that failed."""
        address = self._client.address
        for attempt in range(ATTEMPTS):
            if attempt:
                await self._sleep(1.0)
            try:
                info = await self._client.fetch_info()
            except _BROKEN as error:
                log.warning(
                    "prefill server %s does not answer: %s", address, str(error) or type(error).__name__
                )
                continue
            why = self._find_mismatch(info)
            return why if why is not None else await self._join()
        return f"Could not fetch prefill parallel info from {address} after {ATTEMPTS} attempts"

    def _find_mismatch(self, info: PrefillInfo) -> str | None:
        """Return why the two servers do not fit together; None if they do."""
        ours = {
            "page_size": (self._network.page_size, info.page_size, "--page-size"),
            "kv_cache_dtype": (self._network.settings.kv_dtype, info.kv_cache_dtype, "--kv-cache-dtype"),
            "decode_allocation_policy": (
                *("early", info.decode_allocation_policy),
                "--disaggregation-decode-allocation-policy",
            ),
        }
        for name, (own, theirs, flag) in ours.items():
            if theirs is not None and theirs != own:
                return (
                    f"{name} mismatch: prefill server has {theirs}, but decode server has {own}. Both servers must use "
                    f"the same {flag} value."
                )
        return None

    async def _join(self) -> str | None:
        try:
            rank = await self._client.fetch_rank()
            self.channel = await Channel.connect(
                rank.rank_ip, rank.rank_port, self._network.page_size, self._on_news
            )
        except _BROKEN as error:
            why = str(error) or type(error).__name__
            return (
                "Could not fetch bootstrap info for: prefill_dp_rank: 0 prefill_cp_rank: 0 target_tp_rank: 0 and "
                f"target_pp_rank 0 ({why})"
            )
        self._reading = asyncio.get_running_loop().create_task(self._read(self.channel))

        def connect(now_ns: int) -> None:
            self.is_known = True
            waiting, self._waiting = self._waiting, []
            for engine_id in waiting:
                self._network.driver.note(now_ns, "connect", str(engine_id))
                self._network.pushes.connect(engine_id, now_ns)

        self._network.enqueue(connect)
        return None

    async def _read(self, channel: Channel) -> None:
        try:
            await channel.run()
        except _BROKEN as error:
            log.warning(
                "prefill server %s is disconnected: %s",
                self._client.address,
                str(error) or type(error).__name__,
            )
        finally:
            channel.close()
            if self.channel is channel:
                self.channel = None

    async def _watch(self) -> None:
        """Look at it at intervals, as SGLang does; return when it is lost."""
        settings, failures = self._network.settings, 0
        while True:
            await self._sleep(settings.heartbeat_s)
            healthy = await self._client.is_healthy()
            failures = 0 if healthy else failures + 1
            if failures >= settings.heartbeat_failures or (healthy and self.channel is None):
                self._lose()
                return

    def _lose(self) -> None:
        reason = f"Lost connection with prefill instance (bootstrap_addr: {self._client.address})"
        log.error("%s", reason)
        if self.channel is not None:
            self.channel.close()

        def lose(now_ns: int) -> None:
            self.is_known = False
            self._network.driver.note(now_ns, "lose", str(self.number))
            self._network.lose(self.number, reason, now_ns)

        self._network.enqueue(lose)

    def _fail_waiting(self, reason: str) -> None:
        def fail(now_ns: int) -> None:
            waiting, self._waiting = self._waiting, []
            for engine_id in waiting:
                self._network.driver.note(now_ns, "fail", str(engine_id))
                self._network.fail(engine_id, reason, now_ns)

        self._network.enqueue(fail)

    def _on_news(self, news: News) -> None:
        if news.news in ("done", "failed", "drained"):
            self._network.enqueue(lambda now_ns: self._network.receive(self.number, news, now_ns))
