"""KV events: reports of blocks that a worker stored or removed."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from understudy._core import Tier  # noqa: TC001  # msgspec reads the annotations at run time

Stream: TypeAlias = Literal["raw", "consolidated"]
FULL_ATTENTION = "full_attention"  # vLLM's name of the usual kind of KV cache


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that appeared.

    `generation` grows with every residency of a hash on a tier, so that a late Removed cannot undo a newer Stored.
    """

    sequence_hash: int
    local_hash: int | None  # None when the store does not know it
    position: int  # index of the block in its prompt; -1 when a received message does not contain it
    generation: int
    token_ids: tuple[int, ...] | None  # None unless the store keeps them


class RemovedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that left, with the generation of its Stored."""

    sequence_hash: int
    position: int
    generation: int


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """A run of blocks appeared on a tier, each the child of the one before it.

    `parent_hash` is the sequence hash of the block before the first one: None at position 0, or when the store does
    not know it. `group` is the cache group of a model with several kinds of attention; `attention` names its kind and
    `window` its sliding window in tokens. Adapter, salt and session are those of the request that the blocks were
    computed for. `lookahead`: for every block, the next tokens that its hash covers too; None when it covers none.
    """

    event_id: int
    parent_hash: int | None
    blocks: tuple[StoredBlock, ...]
    tier: Tier
    dp_rank: int
    group: int = 0
    lora: str | None = None
    salt: str | None = None
    session: str | None = None
    lora_id: int | None = None
    attention: str = FULL_ATTENTION
    window: int | None = None
    lookahead: tuple[tuple[int, ...], ...] | None = None
    covered: tuple[int, ...] | None = None
    """With several cache groups: hashes of all units of hashing in the event, also of those without a block of it."""
    token_ids: tuple[int, ...] | None = None
    """All tokens of the event, where those of `blocks` are only a part."""
    block_size: int | None = None
    """Tokens per block, where groups have their own."""


class Removed(msgspec.Struct, frozen=True, tag="removed"):
    """Blocks left a tier, in this order."""

    event_id: int
    blocks: tuple[RemovedBlock, ...]
    tier: Tier
    dp_rank: int
    group: int = 0


class Cleared(msgspec.Struct, frozen=True, tag="cleared"):
    """The worker removed all blocks on all tiers."""

    event_id: int
    dp_rank: int


class EventsLost(msgspec.Struct, frozen=True, tag="events_lost"):
    """A bounded ring overflowed: `count` rows, older than the following events, are lost.

    A view built from the stream is not exact; rebuild it.
    """

    count: int
    dp_rank: int


KvEvent: TypeAlias = Stored | Removed | EventsLost  # events that a store reports
PublishedEvent: TypeAlias = Stored | Removed | Cleared  # events that processes exchange
