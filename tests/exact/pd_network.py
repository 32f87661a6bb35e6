"""A NIXL that moves nothing: agents exchange notifications, and transfers take ticks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Line = dict[str, Any]

HEARTBEAT = b"HB:"
REGISTRATION = b"PUSH_REG:"
WIRE: Line = {
    "latency": 0,
    "blocks_per_tick": None,
    "link": "parallel",
    "handshake": 0,
    "proxy": 1,
    "tick_s": 1.0,
}
"""Defaults of a scenario's network."""


@dataclass
class Transfer:
    """Blocks in flight for a request, from the tick of posting to that of `done`."""

    request: str
    done: int
    failed: bool


@dataclass
class Message:
    """A notification that an agent may read from a tick on."""

    text: bytes
    ready: int


@dataclass
class Network:
    """The clock, the link and the messages between two agents."""

    wire: Line
    fail: Line
    tick: int = 0
    link_free: int = 0
    failed_handshakes: int = 0
    boxes: dict[str, list[Message]] = field(default_factory=lambda: {"p": [], "d": []})

    def perf_counter(self) -> float:
        """Return the time in seconds, in place of Python's `time`."""
        return float(self.tick * self.wire["tick_s"])

    def post(self, request: str, blocks: int) -> Transfer:
        """Start a transfer and compute when it is done."""
        rate = self.wire["blocks_per_tick"]
        duration = 0 if rate is None else -(-blocks // rate)
        begin = self.tick
        if self.wire["link"] == "fifo":
            begin = max(begin, self.link_free)
            self.link_free = begin + duration
        done = begin + duration + self.wire["latency"]
        return Transfer(request, done, self.fail.get(request) == "read")


class Agent:
    """The part of NIXL's agent that the connector's worker calls; what it did in an iteration is in its lists."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.peer = "d" if name == "p" else "p"
        self.posted: list[Line] = []
        self.notified: list[str] = []
        self.registered: list[str] = []
        self.received: list[str] = []
        self._network = network
        self._prepared: list[tuple[list[int], list[int], bytes]] = []
        self._transfers: dict[int, Transfer] = {}

    def clear(self) -> None:
        """Forget what was done in the last iteration."""
        for done in (self.posted, self.notified, self.registered, self.received):
            done.clear()

    def make_prepped_xfer(
        self, _kind: str, _local: int, local: Any, _remote: int, remote: Any, notif_msg: bytes
    ) -> int:
        """Prepare a transfer; RuntimeError if the scenario says that its setup fails."""
        request = name_in(notif_msg)
        if self._network.fail.get(request) == "setup":
            raise RuntimeError("the scenario says that this transfer fails when it is posted")
        self._prepared.append(([int(block) for block in local], [int(block) for block in remote], notif_msg))
        return len(self._prepared) - 1

    def transfer(self, handle: int) -> None:
        """Post a transfer; the peer is notified when it is done, unless it fails."""
        local, remote, text = self._prepared[handle]
        request = name_in(text)
        transfer = self._transfers[handle] = self._network.post(request, len(local))
        self.posted.append({"req": request, "local": local, "remote": remote, "done": transfer.done})
        if not transfer.failed:
            self._network.boxes[self.peer].append(Message(text, transfer.done))

    def check_xfer_state(self, handle: int) -> str:
        """Return NIXL's word for the state of a transfer."""
        transfer = self._transfers[handle]
        if self._network.tick < transfer.done:
            return "PROC"
        return "ERR" if transfer.failed else "DONE"

    def get_xfer_telemetry(self, _handle: int) -> Any:
        """Return the measures of a transfer: none."""
        return SimpleNamespace(xferDuration=0, postDuration=0, totalBytes=0, descCount=0)

    def release_xfer_handle(self, handle: int) -> None:
        """Forget a transfer."""
        self._transfers.pop(handle, None)

    def check_remote_metadata(self, _agent: str) -> bool:
        """Return whether the peer's metadata is valid: always."""
        return True

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Send a message, which the peer may read at once."""
        self._network.boxes[agent].append(Message(notif_msg, self._network.tick))
        if notif_msg.startswith(REGISTRATION):
            self.registered.append(registered_name(notif_msg))
        elif not notif_msg.startswith(HEARTBEAT):
            self.notified.append(name_in(notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the messages that are there, in the order of posting."""
        box = self._network.boxes[self.name]
        ready = [message.text for message in box if message.ready <= self._network.tick]
        box[:] = [message for message in box if message.ready > self._network.tick]
        self.received += [name_in(text) for text in ready if not text.startswith((HEARTBEAT, REGISTRATION))]
        return {self.peer: ready}


class Handshakes:
    """An executor of one handshake at a time, which ends when an iteration begins that is late enough."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pending: list[tuple[Future[Any], Callable[[], Any], int]] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a handshake."""
        future: Future[Any] = Future()
        due = self._network.tick + self._network.wire["handshake"]
        self._pending.append((future, lambda: work(*args), due))
        return future

    def end_due(self) -> None:
        """End the handshakes that are due; the first one fails if the scenario says so."""
        network = self._network
        due = [entry for entry in self._pending if entry[2] <= network.tick]
        self._pending = [entry for entry in self._pending if entry[2] > network.tick]
        for future, work, _ in due:
            if network.fail.get("handshake") and not network.failed_handshakes:
                network.failed_handshakes += 1
                future.set_exception(RuntimeError("the scenario says that the first handshake fails"))
            else:
                future.set_result(work())

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no thread."""


def name_in(text: bytes) -> str:
    """Return the request in a notification of a transfer's end."""
    return text.decode().rsplit(":", 1)[0]


def registered_name(text: bytes) -> str:
    """Return the request in a registration."""
    return str(msgspec.msgpack.decode(text[len(REGISTRATION) :])["request_id"])
