"""One side of a disaggregated SGLang server: its engine's requests by room, and the messages about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import LiveNet
from understudy.server.api.errors import ApiError
from understudy.server.push.channel import News
from understudy.server.push.decode import DecodePeers
from understudy.server.push.prefill import PrefillPeers
from understudy.server.push.rooms import read_bootstrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from understudy.http import Outbox
    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.live_request import LiveRequest
    from understudy.server.push.settings import Bootstrap, PushSettings

NS_PER_S = 1_000_000_000


class PushNetwork:
    """Carries the KV of a server's engine to or from other processes. A driver runs it with the engine."""

    def __init__(self, driver: Driver, settings: PushSettings, page_size: int) -> None:
        self.net = LiveNet(settings.links(page_size))
        self.driver = driver
        self.settings = settings
        self.page_size = page_size
        prefills = settings.prefills
        self.number = self.net.add_worker(produces=prefills, consumes=not prefills)
        self.pushes = self.net.pushes
        self.pushes.set_limits(
            boot_ns=round(settings.boot_timeout_s * NS_PER_S),
            wait_ns=round(settings.wait_timeout_s * NS_PER_S),
            drain_ns=round(settings.drain_timeout_s * NS_PER_S),
        )
        self.core: EngineCore
        """Set by `join`."""
        self.rooms: dict[int, int] = {}
        """The engine's ids of requests, by room."""
        self.failures = {"bootstrap": 0, "transfer": 0}
        """Failed requests, by the stage in which they failed."""
        self.moved_bytes = 0
        """Bytes of KV that have arrived from here."""
        self._room_of: dict[int, int] = {}
        self._peer_of: dict[int, int] = {}
        self._offered: set[int] = set()
        self._reasons: dict[int, str] = {}
        self.prefill_side = PrefillPeers(self) if prefills else None
        self.decode_side = None if prefills else DecodePeers(self)
        driver.network = self

    # ── The driver's calls ──

    @property
    def next_wake_ns(self) -> int | None:
        """When KV next arrives, or a side stops to wait."""
        return self.net.next_wake_ns

    def run_until(self, now_ns: int) -> None:
        """Finish the transfers that end by then."""
        self.net.run_until(now_ns)

    def settle(self) -> list[EngineCore]:
        """Send the engine's messages; return it if something has arrived."""
        for worker, news, request, prefix in self.pushes.take_messages():
            room = self._room_of.get(request)
            if room is None:
                continue
            tokens = prefix
            if news == "offered":
                self._offered.add(request)
            elif news == "done":
                tokens = self.cached_tokens(request)
            reason = self._reasons.get(request, "Aborted by AbortReq.") if news == "failed" else ""
            self.send(worker, News(news, room, tokens, reason))  # type: ignore[arg-type]
        for _, _, moved, _, _, failed in self.net.take_ended():
            self.moved_bytes += 0 if failed else moved
        for request in self.pushes.take_forgotten():
            room = self._room_of.pop(request, None)
            if room is not None and self.rooms.get(room) == request:
                del self.rooms[room]
            self._offered.discard(request)
            self._peer_of.pop(request, None)
            self._reasons.pop(request, None)
        return [self.core] if self.number in self.net.take_reached() else []

    def send(self, worker: int, news: News) -> None:
        """Send news to a far worker; without a connection they are lost."""
        if self.prefill_side is not None:
            self.prefill_side.send(worker, news)
        elif self.decode_side is not None:
            self.decode_side.send(worker, news)

    def cached_tokens(self, request: int) -> int:
        """Return the cached tokens of a request's prompt on this side."""
        live = self.core.live.get(request)
        return 0 if live is None else live.cached_tokens

    # ── The server's calls ──

    def join(self, core: EngineCore) -> None:
        """Connect the engine."""
        self.core = core
        core.on_failed, core.failed_stages = self._describe_failure, self.failures

    async def start(self, host: str, http_port: int, outbox: Outbox) -> None:
        """Listen for decode servers. ConfigError when the bootstrap port cannot be bound."""
        if self.prefill_side is not None:
            await self.prefill_side.start(host, http_port, outbox)

    async def close(self) -> None:
        """Stop listening, and disconnect."""
        if self.prefill_side is not None:
            await self.prefill_side.close()
        if self.decode_side is not None:
            await self.decode_side.close()

    def restart(self, now_ns: int) -> None:
        """Give up all requests, because the engine was replaced; the other sides are notified."""
        self.pushes.abandon(self.number, now_ns)

    # ── Requests ──

    def prepare(self, request: LiveRequest, fields: dict[str, Any] | None, index: int, count: int) -> None:
        """Give a request its room. ApiError names a field that is missing or wrong."""
        bootstrap = read_bootstrap(fields, index, count, self.settings)
        if not bootstrap.alone and bootstrap.room in self.rooms:
            raise ApiError(
                f"bootstrap_room: {bootstrap.room} is the room of another request; give each request its own"
            )
        request.bootstrap = bootstrap
        request.leg = self.settings.role

    def open(self, request: LiveRequest, engine_id: int, now_ns: int) -> None:
        """Open the transfer of a request that the engine is about to get."""
        bootstrap, prefills = request.bootstrap, self.settings.prefills
        if bootstrap is None or bootstrap.alone:  # the server's own, or SGLang's fake transfer
            self.pushes.open_alone(engine_id, self.number, prefills=prefills)
            return
        self.rooms[bootstrap.room] = engine_id
        self._room_of[engine_id] = bootstrap.room
        if self.prefill_side is not None:
            self.pushes.open(engine_id, self.number, prefills=True, now_ns=now_ns)
            self.prefill_side.deliver_early(bootstrap.room, now_ns)
        elif self.decode_side is not None:
            number, connected = self.decode_side.find(bootstrap, engine_id)
            self._peer_of[engine_id] = number
            self.pushes.open(
                engine_id, self.number, prefills=False, far=number, connected=connected, now_ns=now_ns
            )

    def give_up(self, engine_id: int, now_ns: int) -> None:
        """Forget a request that the engine did not take."""
        self.pushes.leave(engine_id, prefills=self.settings.prefills, now_ns=now_ns)

    def fail(self, engine_id: int, reason: str, now_ns: int) -> None:
        """Fail a request of a decode server whose prefill server is not there."""
        self._reasons[engine_id] = reason
        self.pushes.receive(engine_id, "failed", 0, 0, now_ns)

    def lose(self, worker: int, reason: str, now_ns: int) -> None:
        """Fail all requests with a far worker that is lost."""
        for engine_id, peer in self._peer_of.items():
            if peer == worker:
                self._reasons.setdefault(engine_id, reason)
        self.pushes.lose(worker, now_ns)

    def receive(self, worker: int, news: News, now_ns: int) -> bool:
        """Deliver news to the engine; False if it has no request of that room."""
        engine_id = self.rooms.get(news.room)
        if engine_id is None:
            return False
        self.driver.note(now_ns, news.news, f"{engine_id}:{worker}:{news.tokens}")
        self._peer_of[engine_id] = worker
        if news.news == "done" and engine_id in self.core.live:
            live = self.core.live[engine_id]
            live.cached_tokens = max(live.cached_tokens, news.tokens)
        if news.news == "failed" and news.reason:
            self._reasons[engine_id] = news.reason[:1000]
        if news.news == "reported":
            self._reasons.setdefault(engine_id, "The decode server has given the request up.")
        self.pushes.receive(engine_id, news.news, worker, news.tokens, now_ns)
        return True

    def enqueue(self, action: Callable[[int], object]) -> None:
        """Queue `action(now_ns)`, in order with the engine's other inputs."""
        self.driver.enqueue(self.core, action)

    def _describe_failure(self, request: LiveRequest) -> None:
        """Say in SGLang's words why a request has failed."""
        bootstrap: Bootstrap | None = request.bootstrap
        if bootstrap is None:
            return
        prefills = self.settings.prefills
        is_open = request.emitted > 0 if prefills else request.engine_id in self._offered
        stage = "transfer" if is_open else "bootstrap"
        self.failures[stage] += 1
        reason = self._reasons.get(request.engine_id)
        waited_s = (request.finish_ns - request.arrival_ns) / NS_PER_S
        if reason is None and prefills and not is_open and waited_s >= self.settings.boot_timeout_s:
            reason = f"Request {bootstrap.room} timed out after {waited_s:.1f}s in KVPoll.Bootstrapping"
        elif reason is None and not prefills and is_open and waited_s >= self.settings.wait_timeout_s:
            reason = f"Request {bootstrap.room} timed out after {waited_s:.1f}s in KVPoll.WaitingForInput"
        elif reason is None:
            reason = "Failed due to an unknown reason from another rank"
        what = f"{'Prefill' if prefills else 'Decode'} {stage if is_open or prefills else 'handshake'} failed"
        request.failure = (
            f"{what} for request rank=0 req.rid={request.name!r} req.bootstrap_room={bootstrap.room} with exception "
            f"KVTransferError(bootstrap_room={bootstrap.room}): {reason}"
        )
