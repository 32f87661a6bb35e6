"""KV events of a live engine on the wire: what it says at the end of each step, with the tokens it speaks of."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.errors import ConfigError
from understudy.events.decode import decode
from understudy.events.events import Cleared, PublishedEvent, Removed, Stored
from understudy.events.publisher import Publisher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities
    from understudy.server.core import LiveRequest


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, and the release whose bytes are sent."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    """`{host}`, `{port}` and `{model}` in it stand for the server's own: `kv@{host}:{port}@{model}` is llm-d's."""
    dialect: str = "vllm"

    @classmethod
    def read(cls, settings: dict[str, Any]) -> KvEventsConfig:
        """ConfigError names a field that is unknown or wrong."""
        try:
            config = msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-events-config: {error}") from None
        if config.publisher not in (None, "zmq", "null"):
            raise ConfigError(f"--kv-events-config: publisher must be zmq or null, got {config.publisher!r}")
        return config

    def at(self, host: str, port: int, model: str) -> KvEventsConfig:
        """With the topic of this server; the host is `POD_IP` where that is set, as in a cluster."""
        named = {"{host}": os.environ.get("POD_IP") or host, "{port}": str(port), "{model}": model}
        topic = self.topic
        for name, value in named.items():
            topic = topic.replace(name, value)
        return msgspec.structs.replace(self, topic=topic)

    @property
    def publishes(self) -> bool:
        """Whether anything is sent."""
        return self.enable_kv_cache_events and self.publisher != "null"


class _Names(NamedTuple):
    """What blocks are told with beside their tokens, "" where there is none."""

    lora: str = ""
    salt: str = ""
    session: str = ""


class KvEventSender:
    """Sends the events of one rank. A step that says nothing sends nothing.

    An engine knows blocks by their hashes; the tokens behind them are kept here: of blocks that some tier has, because
    they may be copied to another; of those that a request on its way may fill (`hold`); and of as many others as
    `keep_blocks` says, the latest. They are forgotten between steps only (`forget_some`): while one is open, whoever
    fills blocks in it may have gone already, and what comes may not be held yet.
    """

    def __init__(self, config: KvEventsConfig, block_size: int, rank: int, *, keep_blocks: int) -> None:
        self._config = config
        self._rank = rank
        self._block_size = block_size
        self._keep_blocks = keep_blocks
        self._tokens: dict[int, bytes] = {}  # as 32-bit numbers: a fleet has many blocks
        self._names: dict[int, _Names] = {}  # of those that have any
        self._copies: dict[int, int] = {}  # on all tiers, of those that are on any
        self._held: dict[int, int] = {}  # by requests on their way
        self._gone: deque[list[int]] = deque()  # what requests held that live no more
        self._nowhere: dict[int, None] = {}  # the rest of those whose tokens are known, the longest ago first
        self._cleared = False
        self.stopped = False
        self.lose = 0
        """Batches that are to be lost on the way, on purpose."""
        self._publisher = self._open()

    def _open(self) -> Publisher:
        config = self._config
        return Publisher(
            config.endpoint,
            replay=config.replay_endpoint,
            dialect=config.dialect,
            rank=self._rank,
            topic=config.topic,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
        )

    @property
    def endpoint(self) -> str:
        """Where it is published, with the port that was picked."""
        return self._publisher.endpoint

    @property
    def next_sequence(self) -> int:
        """The number of the next message."""
        return self._publisher.next_sequence

    def describe(self) -> dict[str, Any]:
        """As `/kv_event_sources` tells it."""
        told = msgspec.to_builtins(self._config)
        del told["dialect"]
        return {
            **told,
            "publisher": "zmq",
            "endpoint": self._publisher.endpoint,
            "replay_endpoint": self._publisher.replay,
        }

    def remember(
        self,
        identities: Identities,
        tokens: npt.NDArray[np.uint32],
        *,
        salt: str = "",
        lora: str = "",
        session: str = "",
    ) -> None:
        """A request comes whose blocks are these."""
        size = self._block_size
        names = _Names(lora, salt, session) if lora or salt or session else None
        for place, value in enumerate(identities.sequence_hashes.tolist()):
            if value not in self._tokens:
                self._tokens[value] = tokens[place * size : (place + 1) * size].tobytes()
            if names is not None:
                self._names[value] = names
            elif self._names:
                self._names.pop(value, None)
            if value not in self._copies and value not in self._held:
                self._nowhere.pop(value, None)
                self._nowhere[value] = None

    def hold(self, request: LiveRequest) -> None:
        """Its blocks are remembered for as long as it lives, however many requests wait with it."""
        assert request.identities is not None
        values = request.identities.sequence_hashes.tolist()
        for value in values:
            self._held[value] = self._held.get(value, 0) + 1
            self._nowhere.pop(value, None)
        # However it ends, and also if it is refused. That may be found in the middle of anything, so it is only noted.
        weakref.finalize(request, self._gone.append, values).atexit = False

    def _release(self) -> None:
        while self._gone:
            for value in self._gone.popleft():
                left = self._held.pop(value) - 1
                if left > 0:
                    self._held[value] = left
                elif value not in self._copies and value in self._tokens:
                    self._nowhere[value] = None

    def _came(self, value: int) -> None:
        self._copies[value] = self._copies.get(value, 0) + 1
        self._nowhere.pop(value, None)

    def _went(self, value: int) -> None:
        left = self._copies.pop(value, 0) - 1
        if left > 0:
            self._copies[value] = left
        elif value in self._tokens and value not in self._held:
            self._nowhere[value] = None

    def forget_some(self) -> None:
        """No step is open: nothing will be told of but what requests hold, and what is copied."""
        self._release()
        while len(self._nowhere) > self._keep_blocks:
            value = next(iter(self._nowhere))
            del self._nowhere[value]
            del self._tokens[value]
            self._names.pop(value, None)

    def forget_all(self) -> None:
        """The cache was cleared: readers hear of it with the next step."""
        self._cleared = True
        self._copies.clear()
        self._nowhere = {value: None for value in self._tokens if value not in self._held}

    def restart(self) -> None:
        """The engine died and another took its place: its stream begins again at 0."""
        self._publisher.close()
        self.forget_all()  # but for what somebody holds, who may have come for the next engine
        self._cleared = False
        self._publisher = self._open()

    def on_step(self, batch: EventBatch) -> None:
        """Send what the engine said of the step."""
        if not len(batch) and not self._cleared:
            self.forget_some()
            return
        spoken: list[PublishedEvent] = []
        if self._cleared:
            spoken.append(Cleared(0, self._rank))
            self._cleared = False
        for event in decode(batch, dp_rank=self._rank, block_size=self._block_size, stream="raw"):
            if isinstance(event, Stored):
                spoken.append(self._with_tokens(event))
                for block in event.blocks:
                    self._came(block.sequence_hash)
            elif isinstance(event, Removed):  # an engine speaks of them one by one
                for gone in event.blocks:
                    self._went(gone.sequence_hash)
                spoken += [
                    Removed(event.event_id, (block,), event.tier, event.dp_rank) for block in event.blocks
                ]
        self.forget_some()
        if self.stopped:
            return
        lost = self.lose > 0
        self.lose -= lost
        self._publisher.publish_events(spoken, block_size=self._block_size, lost=lost)

    def _with_tokens(self, event: Stored) -> Stored:
        blocks = []
        for block in event.blocks:
            tokens = self._tokens.get(block.sequence_hash)
            if tokens is None:
                return event
            blocks.append(msgspec.structs.replace(block, token_ids=tuple(memoryview(tokens).cast("I"))))
        names = self._names.get(event.blocks[-1].sequence_hash, _Names()) if blocks else _Names()
        return msgspec.structs.replace(
            event,
            blocks=tuple(blocks),
            lora=names.lora or None,
            salt=names.salt or None,
            session=names.session or None,
        )

    def close(self) -> None:
        """Let go of the addresses."""
        self._publisher.close()
