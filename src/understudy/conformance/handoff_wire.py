"""The network between two instances, by ticks: transfers, notifications, heartbeats and the first handshake."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.conformance.handoff_scenario import HandOffScenario

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
class Peering:
    """An instance's connection to its peer. `due`: when the handshake that is under way ends."""

    connected: bool = False
    due: int | None = None


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
    to_p: Peering = field(default_factory=Peering)
    to_d: Peering = field(default_factory=Peering)
    """Push only: in pull mode the prefill instance sends nothing."""
    waiting: list[Transfer] = field(default_factory=list)
    """Transfers, notifications and registrations of the decode instance that wait for its handshake."""
    unwritten: list[tuple[int, list[int]]] = field(default_factory=list)
    """Push: writes that wait for the handshake of the prefill instance."""
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

    def _fails_at_once(self, request: int) -> bool:
        return self.scenario.fail.get(self.scenario.requests[request].id) == "setup"

    # The first handshake.

    def _end_handshake(self, peering: Peering, tick: int) -> bool:
        """End a handshake that is due; return whether it failed."""
        if peering.due is None or tick < peering.due:
            return False
        peering.due = None
        if self.scenario.fail.get("handshake") and not self._failed_once:
            self._failed_once = True
            return True
        peering.connected = True
        return False

    _failed_once: bool = False

    def _need(self, peering: Peering, tick: int) -> bool:
        """Start a handshake unless there is one; return whether the peer is connected."""
        if not peering.connected and peering.due is None:
            if self.scenario.wire.handshake == 0:
                peering.connected = True
            else:
                peering.due = tick + self.scenario.wire.handshake
        return peering.connected

    # Pull: the decode instance reads.

    def begin_reads(
        self, tick: int, pulls: list[tuple[int, list[int]]], heartbeat: list[int]
    ) -> tuple[list[Transfer], list[int], list[Transfer]]:
        """Post reads. Returns them, the requests that the peer is notified of, and reads that failed at once."""
        failed = self._fail_waiting(tick)
        orders = [Transfer(request, blocks, tick, notify_only=not blocks) for request, blocks in pulls]
        if (orders or heartbeat) and not self._need(self.to_p, tick):
            self.waiting += orders
            return [], [], failed
        if heartbeat:
            self.heartbeats.append(heartbeat)
        if self.to_p.connected:
            orders += self.waiting
            self.waiting = []
        posted: list[Transfer] = []
        notified: list[int] = []
        for order in orders:
            if order.notify_only:
                self.unread.append(Transfer(order.request, [], tick, notify_only=True))
                notified.append(order.request)
            elif self._fails_at_once(order.request):
                failed.append(order)
            else:
                posted.append(self.post(tick, order.request, order.blocks))
        return posted, notified, failed

    def _fail_waiting(self, tick: int) -> list[Transfer]:
        """End the decode instance's handshake; return what fails with it. Notifications are lost."""
        if not self._end_handshake(self.to_p, tick):
            return []
        failed = [order for order in self.waiting if not order.notify_only]
        self.waiting = []
        return failed

    # Push: the decode instance registers its blocks, and the prefill instance writes.

    def register(
        self, tick: int, pulls: list[tuple[int, list[int]]], heartbeat: list[int]
    ) -> tuple[list[int], list[Transfer]]:
        """Send registrations. Returns their requests, and those that failed with the handshake."""
        failed = self._fail_waiting(tick)
        orders = [Transfer(request, blocks, tick) for request, blocks in pulls if blocks]
        if heartbeat and self._need(self.to_p, tick):
            self.heartbeats.append(heartbeat)
        self.waiting += orders
        if not self.waiting or not self._need(self.to_p, tick):
            return [], failed
        sent, self.waiting = self.waiting, []
        self.on_the_way += [(order.request, order.blocks) for order in sent]
        return [order.request for order in sent], failed

    def begin_writes(self, tick: int, finished: list[int]) -> list[Transfer]:
        """Post the writes for newly finished prompts, then those for newly read registrations."""
        was_waiting, self.unwritten = self.unwritten, []
        if self._end_handshake(self.to_d, tick):
            was_waiting = []
        elif not self.to_d.connected:
            self.unwritten, was_waiting = was_waiting, []
        matched = was_waiting
        for request in finished:
            blocks = self.registered.pop(request, None)
            if blocks is None:
                self.finished[request] = self.handed[request]
            else:
                matched.append((request, blocks))
        for request, blocks in self.on_the_way:
            if self.finished.pop(request, None) is None:
                self.registered[request] = blocks
            else:
                matched.append((request, blocks))
        self.on_the_way = []
        if not matched:
            return []
        if not self._need(self.to_d, tick):
            self.unwritten += matched
            return []
        return [
            self.post(tick, request, blocks)
            for request, blocks in matched
            if not self._fails_at_once(request)
        ]

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
