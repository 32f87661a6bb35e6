"""The prefill side: decode servers connect to it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import ConfigError
from understudy.http.listen import address_of
from understudy.server.push.bootstrap import BootstrapServer, PrefillInfo, RankInfo, find_local_address
from understudy.server.push.channel import MAX_LINE, Channel, News

if TYPE_CHECKING:
    from understudy.http import Outbox
    from understudy.server.push.side import Side

log = logging.getLogger("understudy.server")

MAX_EARLY = 1 << 16
"""Most offers for rooms whose request is not here yet; the oldest are dropped."""
MAX_PEERS = 1024
"""Most decode servers that are connected at a time."""


class PrefillPeers:
    """The decode servers of a prefill server, and its bootstrap server."""

    def __init__(self, network: Side) -> None:
        self._network = network
        self.bootstrap = BootstrapServer(
            PrefillInfo(page_size=network.page_size, kv_cache_dtype=network.settings.kv_dtype)
        )
        self._server: asyncio.Server | None = None
        self._channels: dict[int, Channel] = {}
        self._free: list[int] = []
        self._count = 0
        self._early: dict[int, tuple[int, News]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, http_port: int, outbox: Outbox) -> None:
        """Listen for decode servers. ConfigError when a port cannot be bound."""
        port = self._network.settings.bootstrap_port
        try:
            self._server = await asyncio.start_server(self._serve, host, 0, limit=MAX_LINE)
            rank = RankInfo(find_local_address(host), self._server.sockets[0].getsockname()[1])
            await self.bootstrap.start(host, port, outbox, rank, http_port)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"--disaggregation-bootstrap-port: cannot listen on {address_of(host, port)} ({why}); "
                "choose another port"
            ) from None

    async def close(self) -> None:
        """Stop listening, and disconnect the decode servers."""
        self.bootstrap.close()
        if self._server is not None:
            self._server.close()
        for channel in tuple(self._channels.values()):
            channel.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def connected(self) -> int:
        """Number of connected decode servers."""
        return len(self._channels)

    def send(self, worker: int, news: News) -> None:
        """Send news to a decode server."""
        channel = self._channels.get(worker)
        if channel is not None:
            channel.send(news)

    def deliver_early(self, room: int, now_ns: int) -> None:
        """Deliver the offer of a room that came before its request."""
        early = self._early.pop(room, None)
        if early is not None:
            self._network.receive(*early, now_ns)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number: int | None = None
        try:
            if len(self._channels) >= MAX_PEERS:
                log.warning(
                    "a decode server is refused: %d are connected; raise the number of prefill servers",
                    MAX_PEERS,
                )
                return
            numbered = number = self._take_number()

            def on_news(news: News) -> None:
                self._network.enqueue(lambda now_ns: self._receive(numbered, news, now_ns))

            channel = await Channel.accept(reader, writer, self._network.page_size, on_news)
            self._channels[number] = channel
            await channel.run()
        except (msgspec.MsgspecError, ValueError, OSError, TimeoutError) as error:
            log.warning("a decode server is disconnected: %s", str(error) or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the server stops
        finally:
            self._tasks.discard(task)
            writer.close()
            if number is not None:
                self._leave(number)

    def _take_number(self) -> int:
        if self._free:
            return self._free.pop()
        net = self._network.net
        number = net.add_worker(produces=False, consumes=True, far=True)
        self._network.pushes.set_far(number)
        return number

    def _leave(self, number: int) -> None:
        """Fail what is on its way to a decode server that has disconnected."""

        def lose(now_ns: int) -> None:
            self._channels.pop(number, None)
            self._early = {room: one for room, one in self._early.items() if one[0] != number}
            self._network.driver.note(now_ns, "lose", str(number))
            self._network.lose(number, "Decode instance could be dead", now_ns)
            self._free.append(number)

        self._network.enqueue(lose)

    def _receive(self, number: int, news: News, now_ns: int) -> None:
        if news.news not in ("offered", "reported"):
            return  # a decode server sends nothing else
        if self._network.receive(number, news, now_ns):
            return
        if news.news == "offered":
            self._early[news.room] = (number, news)
            if len(self._early) > MAX_EARLY:
                del self._early[next(iter(self._early))]
        else:
            self._early.pop(news.room, None)
            self.send(number, News("drained", news.room))  # nothing of it is written any more
