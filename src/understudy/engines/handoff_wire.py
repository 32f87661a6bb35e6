"""The network between two instances, by ticks: transfers, notifications, heartbeats and the first handshake."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.engines.handoff_scenario import HandOffScenario

Line = dict[str, Any]


@dataclass(slots=True)
class Transfer:
    """Blocks in flight for a request. `blocks` are of the decode instance."""

    request: int
    blocks: list[int]
    done: int
    failed: bool = False
    notify_only: bool = False


@dataclass(slots=True)
class Wire:
    """State of the network. Requests are named by their place in the scenario."""

    scenario: HandOffScenario
    handed: dict[int, list[int]] = field(default_factory=dict)
    """Blocks of the prefill instance, by request."""
    heartbeats: list[list[int]] = field(default_factory=list)
    """Not yet read by the prefill instance."""
    unread: list[Transfer] = field(default_factory=list)
    """Transfers that the prefill instance has not seen the end of, in the order of posting."""
    unreported: list[Transfer] = field(default_factory=list)
    """The same for the decode instance."""
    link_free: int = 0
    handshake_done: int | None = None
    connected: bool = False
    waiting: list[Transfer] = field(default_factory=list)
    """Transfers and notifications that wait for the handshake."""
    registered: dict[int, list[int]] = field(default_factory=dict)
    """Push: blocks of the decode instance that the prefill instance may write."""
    on_the_way: list[tuple[int, list[int]]] = field(default_factory=list)
    """Push: registrations that the prefill instance has not read."""
    finished: dict[int, list[int]] = field(default_factory=dict)
    """Push: blocks that are computed and not written."""

    def post(self, tick: int, request: int, blocks: list[int]) -> Transfer:
        """Start a transfer and compute when it is done."""
        wire = self.scenario.wire
        duration = 0 if wire.blocks_per_tick is None else -(-len(blocks) // wire.blocks_per_tick)
        if wire.link == "fifo":
            self.link_free = max(tick, self.link_free) + duration
            done = self.link_free + wire.latency
        else:
            done = tick + duration + wire.latency
        failed = self.scenario.fail.get(self.scenario.requests[request].id) == "read"
        transfer = Transfer(request, blocks, done, failed)
        self.unreported.append(transfer)
        if not failed:
            self.unread.append(transfer)
        return transfer

    # Pull: the decode instance reads.

    def begin_reads(
        self, tick: int, pulls: list[tuple[int, list[int]]], heartbeat: list[int]
    ) -> tuple[list[Transfer], list[int], list[Transfer]]:
        """Post reads. Returns them, the requests that the peer is notified of, and reads that failed at once."""
        failed = self._look_at_handshake(tick)
        was_connected = self.connected
        if (pulls or heartbeat) and not self.connected:
            self._need_handshake(tick)
        if heartbeat and self.connected:
            self.heartbeats.append(heartbeat)
        orders = [Transfer(request, blocks, tick, notify_only=not blocks) for request, blocks in pulls]
        if not self.connected:
            self.waiting += orders
            return [], [], failed
        if was_connected:
            orders += self.waiting
            self.waiting = []
        posted: list[Transfer] = []
        notified: list[int] = []
        for order in orders:
            if order.notify_only:
                self.unread.append(Transfer(order.request, [], tick, notify_only=True))
                notified.append(order.request)
            elif self.scenario.fail.get(self.scenario.requests[order.request].id) == "setup":
                failed.append(order)
            else:
                posted.append(self.post(tick, order.request, order.blocks))
        return posted, notified, failed

    def _look_at_handshake(self, tick: int) -> list[Transfer]:
        if self.handshake_done is None or tick < self.handshake_done:
            return []
        self.handshake_done = None
        if self.scenario.fail.get("handshake") and not self._failed_once:
            self._failed_once = True
            failed = [order for order in self.waiting if not order.notify_only]
            self.waiting = [order for order in self.waiting if order.notify_only]
            return failed
        self.connected = True
        return []

    _failed_once: bool = False

    def _need_handshake(self, tick: int) -> None:
        if self.handshake_done is not None:
            return
        if self.scenario.wire.handshake == 0:
            self.connected = True
        else:
            self.handshake_done = tick + self.scenario.wire.handshake

    # Push: the prefill instance writes.

    def begin_writes(self, tick: int, finished: list[int]) -> list[Transfer]:
        """Post the writes for newly finished prompts, then those for newly read registrations."""
        posted = []
        for request in finished:
            blocks = self.registered.pop(request, None)
            if blocks is None:
                self.finished[request] = self.handed[request]
            else:
                posted.append(self.post(tick, request, blocks))
        for request, blocks in self.on_the_way:
            if self.finished.pop(request, None) is None:
                self.registered[request] = blocks
            else:
                posted.append(self.post(tick, request, blocks))
        self.on_the_way = []
        return posted

    # Ends of transfers.

    def read_ends(self, tick: int) -> list[int]:
        """Requests whose transfer ended by now, as the prefill instance sees it, in the order of posting."""
        ended = [transfer.request for transfer in self.unread if transfer.done <= tick]
        self.unread = [transfer for transfer in self.unread if transfer.done > tick]
        return ended

    def report_ends(self, tick: int) -> list[Transfer]:
        """Transfers that ended by now, as the decode instance sees it."""
        ended = [transfer for transfer in self.unreported if transfer.done <= tick]
        self.unreported = [transfer for transfer in self.unreported if transfer.done > tick]
        return ended
