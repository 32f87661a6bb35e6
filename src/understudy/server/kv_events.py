"""Publishes the KV events of a live engine after each step, with the tokens of the blocks."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy._core import Tier
from understudy.errors import ConfigError
from understudy.events.decode import decode, decode_ranges
from understudy.events.events import Cleared, PublishedEvent, Removed, Stored, StoredBlock
from understudy.events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities
    from understudy.events.events import KvEvent
    from understudy.server.live_request import LiveRequest


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
    """Topic; `{host}`, `{port}` and `{model}` are replaced by the server's: llm-d uses `kv@{host}:{port}@{model}`."""
    dialect: str | None = None
    """Release whose bytes are sent; None: the server's."""

    @classmethod
    def read(cls, settings: dict[str, Any]) -> KvEventsConfig:
        """Read the settings. ConfigError names a field that is unknown or invalid."""
        try:
            config = msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-events-config: {error}") from None
        if config.publisher not in (None, "zmq", "null"):
            raise ConfigError(f"--kv-events-config: publisher must be zmq or null, got {config.publisher!r}")
        return config

    def at(self, host: str, port: int, model: str, release: str = "vllm") -> KvEventsConfig:
        """Return a copy with the topic and the release of this server; `POD_IP`, if set, replaces the host."""
        named = {"{host}": os.environ.get("POD_IP") or host, "{port}": str(port), "{model}": model}
        topic = self.topic
        for name, value in named.items():
            topic = topic.replace(name, value)
        return msgspec.structs.replace(self, topic=topic, dialect=self.dialect or release)

    @property
    def publishes(self) -> bool:
        """True when events are sent."""
        return self.enable_kv_cache_events and self.publisher != "null"


class _Names(NamedTuple):
    """Labels of a block in events, in addition to its tokens; "" for none."""

    lora: str = ""
    lora_id: int = 0
    salt: str = ""
    session: str = ""


class KvEventSender:
    """Publishes the events of one rank. A step without events sends no message.

    `native_offload`: events of lower tiers have hashes only, as those of vLLM's own offload. `groups`: kind, window and
    block size of each KV cache group, if there are several.

    An engine identifies blocks by hash; this class keeps their tokens: of blocks that a tier has, because they may be
    copied to another; of blocks that a request in flight may fill (`retain`); and of the latest `keep_blocks` others.
    It drops tokens between steps only (`trim`): within a step, a request that fills blocks may already have ended, and
    a new one may not be retained yet.
    """

    def __init__(
        self,
        config: KvEventsConfig,
        block_size: int,
        rank: int,
        *,
        keep_blocks: int,
        native_offload: bool = False,
        groups: Sequence[tuple[str, int | None, int]] = (),
    ) -> None:
        self._config = config
        self._groups = groups
        self._rank = rank
        self._block_size = block_size
        self._keep_blocks = keep_blocks
        self._native_offload = native_offload
        # 32-bit numbers, because a fleet has many blocks; with the next tokens that a block's hash covers.
        self._tokens: dict[int, bytes] = {}
        self._names: dict[int, _Names] = {}  # of those that have any
        self._copies: dict[int, int] = {}  # number of tiers that have a block
        self._retained: dict[int, int] = {}  # number of requests in flight by block
        self._ended: deque[list[int]] = deque()  # blocks of requests that have ended
        self._unused: dict[int, None] = {}  # other blocks with known tokens, oldest first
        self._reported: list[Stored] = []  # cached blocks of requests that asked for them
        self.stopped = False
        self.batches_to_drop = 0
        """Number of next batches to drop, as an injected fault."""
        self._publisher = self._open()
        self._cleared = self._publisher.dialect.starts_cleared

    def _open(self) -> Publisher:
        config = self._config
        return Publisher(
            config.endpoint,
            replay=config.replay_endpoint,
            dialect=config.dialect or "vllm",
            rank=self._rank,
            topic=config.topic,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
        )

    @property
    def endpoint(self) -> str:
        """Endpoint of the publisher, with the port that was chosen."""
        return self._publisher.endpoint

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next message."""
        return self._publisher.next_sequence

    def describe(self) -> dict[str, Any]:
        """Describe the publisher for `/kv_event_sources`."""
        fields = msgspec.to_builtins(self._config)
        del fields["dialect"]
        return {
            **fields,
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
        lora_id: int = 0,
        session: str = "",
        hashed_ahead: int = 0,
    ) -> None:
        """Keep the tokens of a new request's blocks, and the `hashed_ahead` next tokens that their hashes cover."""
        size = self._block_size
        names = _Names(lora, lora_id, salt, session) if lora or salt or session else None
        for place, value in enumerate(identities.sequence_hashes.tolist()):
            if value not in self._tokens:
                self._tokens[value] = tokens[place * size : (place + 1) * size + hashed_ahead].tobytes()
            if names is not None:
                self._names[value] = names
            elif self._names:
                self._names.pop(value, None)
            if value not in self._copies and value not in self._retained:
                self._unused.pop(value, None)
                self._unused[value] = None

    def retain(self, request: LiveRequest) -> None:
        """Keep the tokens of a request's blocks while the request is alive."""
        assert request.identities is not None
        values = request.identities.sequence_hashes.tolist()
        for value in values:
            self._retained[value] = self._retained.get(value, 0) + 1
            self._unused.pop(value, None)
        # Covers every end and rejection. A finalizer may run at any point, so it only records the end.
        weakref.finalize(request, self._ended.append, values).atexit = False

    def report_hits(self, request: LiveRequest, named: Identities) -> None:
        """Publish the cached device blocks of an admitted request with its step; vLLM has that since 0.26.

        With several KV cache groups nothing is published: how vLLM names those blocks was not recorded.
        """
        hits = (request.cached_tokens - sum(request.below_tokens)) // self._block_size
        if not hits or self._groups or "locality" not in self._publisher.dialect.stored_fields:
            return
        blocks = tuple(
            StoredBlock(one.sequence_hash, one.local_hash, place, 0, None)
            for place, one in enumerate(named[:hits])
        )
        self._reported.append(Stored(0, None, blocks, Tier.G1, self._rank))

    def _release(self) -> None:
        while self._ended:
            for value in self._ended.popleft():
                left = self._retained.pop(value) - 1
                if left > 0:
                    self._retained[value] = left
                elif value not in self._copies and value in self._tokens:
                    self._unused[value] = None

    def _count_stored(self, value: int) -> None:
        self._copies[value] = self._copies.get(value, 0) + 1
        self._unused.pop(value, None)

    def _count_removed(self, value: int) -> None:
        left = self._copies.pop(value, 0) - 1
        if left > 0:
            self._copies[value] = left
        elif value in self._tokens and value not in self._retained:
            self._unused[value] = None

    def trim(self) -> None:
        """Drop the oldest unused tokens over `keep_blocks`; call between steps only."""
        self._release()
        while len(self._unused) > self._keep_blocks:
            value = next(iter(self._unused))
            del self._unused[value]
            del self._tokens[value]
            self._names.pop(value, None)

    def mark_cleared(self) -> None:
        """Mark the cache as cleared; the next step publishes that."""
        self._cleared = True
        self._copies.clear()
        self._unused = {value: None for value in self._tokens if value not in self._retained}

    def restart(self) -> None:
        """Restart the stream at sequence 0, for a new engine."""
        self._publisher.close()
        self.mark_cleared()  # retained blocks stay: their requests may be for the new engine
        self._publisher = self._open()
        self._cleared = self._publisher.dialect.starts_cleared

    def on_step(self, batch: EventBatch) -> None:
        """Publish the events of a step."""
        if not len(batch) and not self._cleared and not self._reported:
            self.trim()
            return
        events: list[PublishedEvent] = []
        if self._cleared:
            events.append(Cleared(0, self._rank))
            self._cleared = False
        events += map(self._add_tokens, self._reported)
        self._reported = []
        for event in self._decode(batch):
            if isinstance(event, Stored):
                events.append(self._add_tokens(event))
                for block in event.blocks:
                    self._count_stored(block.sequence_hash)
            elif isinstance(event, Removed):
                events.append(event)
                for removed in event.blocks:
                    self._count_removed(removed.sequence_hash)
        self.trim()
        if self.stopped:
            return
        lost = self.batches_to_drop > 0
        self.batches_to_drop -= lost
        self._publisher.publish_events(
            events, block_size=self._block_size, lost=lost, native_offload=self._native_offload
        )

    def _decode(self, batch: EventBatch) -> Iterable[KvEvent]:
        if self._groups:
            return decode_ranges(batch, dp_rank=self._rank, groups=self._groups, unit=self._block_size)
        return decode(batch, dp_rank=self._rank, block_size=self._block_size, stream="raw")

    def _add_tokens(self, event: Stored) -> Stored:
        size = self._block_size
        if event.covered is not None:
            return self._add_range_tokens(event)
        blocks, lookahead = [], []
        for block in event.blocks:
            kept = self._tokens.get(block.sequence_hash)
            if kept is None:
                return event
            tokens = tuple(memoryview(kept).cast("I"))
            blocks.append(msgspec.structs.replace(block, token_ids=tokens[:size]))
            lookahead.append(tokens[size:])
        names = self._names.get(event.blocks[-1].sequence_hash, _Names()) if blocks else _Names()
        return msgspec.structs.replace(
            event,
            blocks=tuple(blocks),
            lora=names.lora or None,
            lora_id=names.lora_id or None,
            lookahead=tuple(lookahead) if all(lookahead) else None,
            salt=names.salt or None,
            session=names.session or None,
        )

    def _add_range_tokens(self, event: Stored) -> Stored:
        size = self._block_size
        tokens: list[int] = []
        assert event.covered is not None
        for value in event.covered:
            kept = self._tokens.get(value)
            if kept is None:
                return event
            tokens += memoryview(kept).cast("I")[:size]
        names = self._names.get(event.covered[-1], _Names())
        return msgspec.structs.replace(
            event,
            token_ids=tuple(tokens),
            lora=names.lora or None,
            lora_id=names.lora_id or None,
            salt=names.salt or None,
            session=names.session or None,
        )

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()
