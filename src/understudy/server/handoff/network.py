"""The hand-offs of a process: its engines, the servers of other processes, and the messages between them."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

from understudy._core import LiveNet
from understudy.errors import ConfigError
from understudy.http.listen import address_of
from understudy.server.api.errors import ApiError
from understudy.server.handoff.channel import Answer, Notice, PeerChannel, SideChannel
from understudy.server.handoff.params import describe_blocks, read_remote, wants_prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.driver import Driver
    from understudy.server.handoff.params import RemoteBlocks
    from understudy.server.handoff.settings import HandOffSettings
    from understudy.server.live_request import LiveRequest

log = logging.getLogger("understudy.server")

MAX_NAMES = 1 << 16
"""Ids of requests that are remembered per peer; the oldest are dropped."""
NOT_KEPT = 1 << 62
"""A prefill worker's id of a request whose blocks it no longer keeps; they are read even so, as vLLM does."""
MAX_PEERS = 1024
"""Most prefill servers of other processes."""


class HandOffNetwork:
    """Carries the hand-offs of a process. A driver runs it with the engines."""

    def __init__(self, driver: Driver, settings: HandOffSettings, block_size: int) -> None:
        self.net = LiveNet(settings.links(block_size))
        self.driver = driver
        self.members: dict[int, HandOffMember] = {}
        self.peers: dict[int, FarPeer] = {}
        self._by_address: dict[tuple[str, int, str], FarPeer] = {}
        driver.network = self

    # ── The driver's calls ──

    @property
    def next_wake_ns(self) -> int | None:
        """When a transfer next ends."""
        return self.net.next_wake_ns

    def run_until(self, now_ns: int) -> None:
        """Finish the transfers that end by then."""
        self.net.run_until(now_ns)

    def settle(self) -> list[EngineCore]:
        """Send what engines have sent to other processes; return the engines for which something has arrived."""
        for number in self.net.take_wanted():
            self.peers[number].connect()
        for peer in self.peers.values():
            peer.send_all()
        for _, reader, moved, posted_ns, landed_ns, failed in self.net.take_ended():
            on_read = self.members[reader].on_read
            if on_read is not None:
                on_read(moved, posted_ns, landed_ns, failed)
        reached = dict.fromkeys(self.net.take_reached())
        return [self.members[number].core for number in reached if number in self.members]

    # ── Members and peers ──

    def find_peer(self, remote: RemoteBlocks, block_size: int) -> tuple[int, int]:
        """Return the worker that has blocks, and its id of the request."""
        for member in self.members.values():
            if member.engine_id == remote.engine_id:
                if not member.settings.produces:
                    raise ApiError(
                        "kv_transfer_params.remote_engine_id names a server that keeps no blocks for others; pass on "
                        "what the prefill server sent",
                        param="kv_transfer_params",
                    )
                return member.number, member.handed.get(remote.request_id, NOT_KEPT)
        address = (remote.host, remote.port, remote.engine_id)
        peer = self._by_address.get(address)
        if peer is None:
            channel = PeerChannel(remote.host, remote.port, block_size, remote.engine_id)
            if len(self.peers) < MAX_PEERS:
                peer = FarPeer(self, channel)
                self.peers[peer.number] = peer
            else:
                peer = self._replace_peer(channel)
            self._by_address[address] = peer
        return peer.number, peer.add(remote)

    def _replace_peer(self, channel: PeerChannel) -> FarPeer:
        """Give the place of a prefill server that is not connected to another. ApiError if all are connected."""
        for address, peer in self._by_address.items():
            if peer.channel.is_closed:
                del self._by_address[address]
                peer.reopen(channel)
                return peer
        raise ApiError(
            f"kv_transfer_params.remote_host: {MAX_PEERS} prefill servers are connected, and there is no room for "
            "another; send the request to another decode server",
            param="kv_transfer_params",
        )

    async def close(self) -> None:
        """Disconnect from all peers."""
        for peer in self.peers.values():
            await peer.channel.close()


class HandOffMember:
    """One engine of the process, as its worker sees it."""

    def __init__(self, network: HandOffNetwork, settings: HandOffSettings, block_size: int) -> None:
        self.network = network
        self.settings = settings
        self.engine_id = settings.engine_id or secrets.token_hex(16)
        self.number = network.net.add_worker(produces=settings.produces, consumes=settings.consumes)
        network.members[self.number] = self
        self.core: EngineCore
        """Set by `join`."""
        self.handed: dict[str, int] = {}
        """The engine's ids of finished prompts, by the id that decode servers know."""
        self.port = settings.port
        self.block_size = block_size
        self.late_notices = 0
        """Notifications about blocks that were no longer kept."""
        self.on_read: Callable[[int, int, int, bool], None] | None = None
        """Called with every read of this engine: bytes, posted ns, landed ns, failed."""
        self.on_polled: Callable[[], None] | None = None
        """Updates the counters; called after a step or a poll."""
        self._channel: SideChannel | None = None

    def join(self, core: EngineCore) -> None:
        """Connect the engine."""
        self.core = core
        core.on_handed = self._hand_over

    async def start(self) -> None:
        """Listen for decode servers. ConfigError when the side channel's address cannot be bound."""
        if self.settings.produces:
            answer = Answer(self.engine_id, self.block_size)
            self._channel = SideChannel(answer, self._on_notice)
            host, port = self.settings.host, self.settings.port
            try:
                self.port = await self._channel.start(host, port)
            except OSError as error:
                raise ConfigError(
                    f"--kv-side-channel-port: the side channel of hand-offs cannot listen on {address_of(host, port)} "
                    f"({error.strerror or error}); choose another --kv-side-channel-port or --kv-side-channel-host"
                ) from None

    def close(self) -> None:
        """Stop listening."""
        if self._channel is not None:
            self._channel.close()

    def restart(self, now_ns: int) -> None:
        """Forget what was kept, because the engine was replaced: reads from it fail."""
        self.handed.clear()
        self.network.net.disconnect(self.number, now_ns)
        self.network.net.connect(self.number, now_ns)
        if self._channel is not None:
            self._channel.drop()

    # ── Requests ──

    def prepare(self, request: LiveRequest, params: dict[str, Any]) -> None:
        """Give a request its part of a hand-off. ApiError names a field that is missing or wrong."""
        if wants_prefill(params):
            if params.get("do_remote_prefill"):
                raise ApiError(
                    "kv_transfer_params: do_remote_decode and do_remote_prefill contradict each other; give one",
                    param="kv_transfer_params",
                )
            if not self.settings.produces:
                raise _wrong_role("do_remote_decode", "kv_producer")
            request.leg = "prefill"
            return
        remote = read_remote(params, self.settings)
        if remote is None:
            return
        if not self.settings.consumes:
            raise _wrong_role("do_remote_prefill", "kv_consumer")
        needed = -(-request.prompt_tokens // self.block_size)
        if remote.blocks < needed:
            raise ApiError(
                f"kv_transfer_params.remote_block_ids has {remote.blocks} blocks, and the prompt needs {needed}; send "
                "the prompt that the prefill server computed",
                param="kv_transfer_params",
            )
        request.leg = "decode"
        request.peer, request.peer_request = self.network.find_peer(remote, self.block_size)

    def _hand_over(self, request: LiveRequest) -> None:
        """Keep the name of a finished prompt, and make the answer's `kv_transfer_params`."""
        if len(self.handed) >= MAX_NAMES:
            held = set(self.core.vllm.held)
            self.handed = {name: engine_id for name, engine_id in self.handed.items() if engine_id in held}
        name = f"{request.name}-{secrets.token_hex(4)}"
        self.handed[name] = request.engine_id
        request.handed = describe_blocks(
            self.core.vllm.held_blocks(request.engine_id),
            engine_id=self.engine_id,
            request_id=name,
            host=self.settings.host,
            port=self.port,
            tokens=request.prompt_tokens + request.emitted - 1,
            cached_tokens=request.cached_tokens,
        )

    def _on_notice(self, notice: Notice) -> None:
        def deliver(now_ns: int) -> None:
            self.deliver(notice, now_ns)

        self.network.driver.enqueue(self.core, deliver)

    def deliver(self, notice: Notice, now_ns: int) -> None:
        """Deliver the message of a decode server to the engine."""
        net, driver = self.network.net, self.network.driver
        for name in notice.done:
            driver.note(now_ns, "done", name)
            engine_id = self.handed.pop(name, None)
            if engine_id is None or engine_id not in self.core.vllm.held:
                self.late_notices += 1
            else:
                net.notify(self.number, engine_id, now_ns)
        kept = [self.handed[name] for name in notice.heartbeat if name in self.handed]
        if kept:
            driver.note(now_ns, "heartbeat", ",".join(notice.heartbeat))
            net.heartbeat(self.number, kept, now_ns)

    def fail_reads(self, count: int) -> None:
        """Let the next reads of this engine fail."""

        def fail(now_ns: int) -> None:
            self.network.driver.note(now_ns, "fail_reads", str(count))
            self.network.net.fail_reads(self.number, count)

        self.network.driver.enqueue(self.core, fail)

    @property
    def in_flight(self) -> int:
        """Number of reads by or from this engine that are under way."""
        return self.network.net.in_flight(self.number)


class FarPeer:
    """A prefill server of another process."""

    def __init__(self, network: HandOffNetwork, channel: PeerChannel) -> None:
        self.number = network.net.add_worker(produces=True, consumes=False, far=True)
        self.channel = channel
        self._network = network
        self._names: dict[int, str] = {}
        self._next_id = 0

    def add(self, remote: RemoteBlocks) -> int:
        """Return a number for the peer's id of a request."""
        self._next_id += 1
        self._names[self._next_id] = remote.request_id
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return self._next_id

    def connect(self) -> None:
        """Begin the handshake."""
        self.channel.connect(self._on_open, self._on_closed)

    def reopen(self, channel: PeerChannel) -> None:
        """Become another prefill server."""
        self.channel = channel
        self._names.clear()

    def _on_open(self) -> None:
        self._enqueue("connect", self._network.net.connect)

    def _on_closed(self, why: str) -> None:
        log.warning("prefill server %s:%d: %s", self.channel.host, self.channel.port, why)
        self._enqueue("disconnect", self._network.net.disconnect)

    def _enqueue(self, kind: str, change: Callable[[int, int], None]) -> None:
        driver = self._network.driver
        member = next(iter(self._network.members.values()))

        def apply(now_ns: int) -> None:
            driver.note(now_ns, kind, f"{self.channel.host}:{self.channel.port}")
            change(self.number, now_ns)

        driver.enqueue(member.core, apply)

    def send_all(self) -> None:
        """Send the notifications and heartbeats of the engines."""
        net = self._network.net
        done = net.take_notes(self.number)
        for request in done:
            name = self._names.pop(request, None)
            if name is not None:
                self.channel.send(Notice(done=[name]))
        for requests in net.take_heartbeats(self.number):
            names = [self._names[request] for request in requests if request in self._names]
            if names:
                self.channel.send(Notice(heartbeat=names))


def _wrong_role(field: str, role: str) -> ApiError:
    return ApiError(
        f"kv_transfer_params.{field} needs a server with kv_role {role} or kv_both",
        param="kv_transfer_params",
    )
