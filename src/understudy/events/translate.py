"""Convert events to and from the wire format of any dialect."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import Tier, salt_hash, xxh3_64
from understudy.errors import MalformedBatch
from understudy.events.dialects import TIER_OF_MEDIUM
from understudy.events.events import FULL_ATTENTION, Cleared, Removed, RemovedBlock, Stored, StoredBlock
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from understudy.events.dialects import Dialect
    from understudy.events.events import PublishedEvent
    from understudy.events.wire import Hash, WireEvent

_NO_POSITIONS: dict[int, int] = {}
_TWO_64 = 1 << 64


def to_wire(
    events: Iterable[PublishedEvent], dialect: Dialect, *, block_size: int, native_offload: bool = False
) -> list[WireEvent]:
    """Convert events to those that an engine of a dialect sends for them, in order.

    Events of tiers that such an engine does not publish are left out, and so are fields that the dialect does not
    have. `native_offload`: vLLM itself copies blocks to the host and sends their hashes only.
    """
    found: list[WireEvent] = []
    for event in events:
        if isinstance(event, Cleared):
            found.append(AllBlocksCleared())
        elif not dialect.publishes_tier(event.tier):
            continue
        elif isinstance(event, Removed):
            found += _convert_removed(event, dialect)
        elif native_offload and event.tier != Tier.G1:
            found += _convert_offloaded(event, dialect)
        else:
            found.append(_convert_stored(event, dialect, block_size))
    return list(_join(found)) if dialect.joins_events else found


def _convert_removed(event: Removed, dialect: Dialect) -> list[BlockRemoved]:
    medium, group = dialect.media.get(event.tier), _find_group(event, dialect)
    hashes = _encode_hashes(event, dialect)
    if event.tier == Tier.G1 and not dialect.joins_events:
        return [BlockRemoved([each], medium, group) for each in hashes]
    return [BlockRemoved(hashes, medium, group)]


def _convert_offloaded(event: Stored, dialect: Dialect) -> list[BlockStored]:
    medium, group = dialect.media.get(event.tier), _find_group(event, dialect)
    hashes = _encode_hashes(event, dialect)
    chunks = [[each] for each in hashes] if dialect.offloads_by_chunk else [hashes]
    return [BlockStored(chunk, None, [], 0, medium=medium, group_idx=group) for chunk in chunks]


def _convert_stored(event: Stored, dialect: Dialect, block_size: int) -> BlockStored:
    fields = dialect.stored_fields
    parent = event.parent_hash
    stored = BlockStored(
        _encode_hashes(event, dialect),
        None if parent is None else _encode_hash(parent, dialect),
        _list_tokens(event),
        event.block_size or block_size,
        medium=dialect.media.get(event.tier),
        group_idx=_find_group(event, dialect),
    )
    if "lora_name" in fields:
        stored.lora_name = event.lora
        stored.lora_id = event.lora_id if dialect.producer == "vllm" else None
    if "session_id" in fields:
        stored.session_id = event.session
    if "cache_salt" in fields or dialect.salt_element:
        stored.cache_salt = event.salt
    if "extra_keys" in fields:
        stored.extra_keys = _extra_keys(event)
    if "kv_cache_spec_kind" in fields:
        stored.kv_cache_spec_kind = event.attention
        stored.kv_cache_spec_sliding_window = event.window
    if event.lookahead is not None and "lookahead_token_ids" in fields:
        stored.lookahead_token_ids = [list(ids) for ids in event.lookahead]
    return stored


def _list_tokens(event: Stored) -> list[int]:
    if event.token_ids is not None:
        return list(event.token_ids)
    tokens = [block.token_ids for block in event.blocks]
    return [] if None in tokens else list(chain.from_iterable(tokens))  # type: ignore[arg-type]


def _find_group(event: Stored | Removed, dialect: Dialect) -> int | None:
    if "group_idx" not in dialect.removed_fields or not (event.tier == Tier.G1 or dialect.offloads_by_chunk):
        return None
    return event.group


def _join(events: Iterable[WireEvent]) -> Iterator[WireEvent]:
    """Yield SGLang's events: one that continues the event before it extends that one."""
    last: WireEvent | None = None
    for event in events:
        if isinstance(event, BlockStored) and isinstance(last, BlockStored) and _continues(event, last):
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        elif (
            isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved) and event.medium == last.medium
        ):
            last.block_hashes += event.block_hashes
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last


def _continues(event: BlockStored, last: BlockStored) -> bool:
    return (
        event.parent_block_hash == last.block_hashes[-1]
        and bool(event.token_ids) == bool(last.token_ids)
        and (event.medium, event.cache_salt, event.lora_name, event.session_id)
        == (last.medium, last.cache_salt, last.lora_name, last.session_id)
    )


def from_wire(
    event: WireEvent, *, event_id: int = 0, dp_rank: int = 0, positions: Mapping[int, int] = _NO_POSITIONS
) -> PublishedEvent:
    """Convert an event of any dialect. Hashes become unsigned 64-bit numbers, a digest its low 64 bits.

    `positions` maps sequence hashes to block positions; a block with an unknown parent has position -1.
    Local hashes are those of the token ids, under the event's adapter and salt; None without ids, or where a block
    contains more than text (an image). MalformedBatch when the event contradicts itself.
    """
    if isinstance(event, AllBlocksCleared):
        return Cleared(event_id, dp_rank)
    if event.medium not in TIER_OF_MEDIUM:
        raise MalformedBatch(f"medium: {event.medium!r} is not known; known are {_list_media()}")
    tier = TIER_OF_MEDIUM[event.medium]
    hashes = [_decode_hash(value) for value in event.block_hashes]
    group = event.group_idx or 0
    if isinstance(event, BlockRemoved):
        blocks = tuple(RemovedBlock(value, positions.get(value, -1), 0) for value in hashes)
        return Removed(event_id, blocks, tier, dp_rank, group)
    parent = None if event.parent_block_hash is None else _decode_hash(event.parent_block_hash)
    if len({*hashes, parent}) <= len(hashes):
        raise MalformedBatch("a stored event names a block twice, or as its own parent")
    salt = event.cache_salt if event.cache_salt is not None else _find_salt(event)
    first = 0 if parent is None else positions.get(parent, -2) + 1
    if tier != Tier.G1 and not event.block_size:  # native offload, without positions
        first = -1
    stored = map(
        StoredBlock,
        hashes,
        _local_hashes(event, salt),
        range(first, first + len(hashes)) if first >= 0 else repeat(-1),
        repeat(0),
        _split_token_ids(event),
    )
    ahead = event.lookahead_token_ids
    return Stored(
        event_id,
        parent,
        tuple(stored),
        tier,
        dp_rank,
        group,
        lora=event.lora_name,
        salt=salt,
        session=event.session_id,
        lora_id=event.lora_id,
        attention=event.kv_cache_spec_kind or FULL_ATTENTION,
        window=event.kv_cache_spec_sliding_window,
        lookahead=None if ahead is None else tuple(map(tuple, ahead)),
    )


def _encode_hashes(event: Stored | Removed, dialect: Dialect) -> list[Hash]:
    if not dialect.signed_hashes:
        return [block.sequence_hash for block in event.blocks]
    return [_encode_hash(block.sequence_hash, dialect) for block in event.blocks]


def _encode_hash(value: int, dialect: Dialect) -> int:
    return value - _TWO_64 if dialect.signed_hashes and value >= _TWO_64 >> 1 else value


def _decode_hash(value: Hash) -> int:
    number = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % _TWO_64
    if number == 0:
        raise MalformedBatch("block hash: 0 is not a hash")
    return number


def _extra_keys(event: Stored) -> list[list[str] | None] | None:
    """List extra keys as vLLM does: the adapter with every block, the salt with the prompt's first block.

    Below the device there are none for plain text.
    """
    salted = event.salt and event.blocks and event.blocks[0].position == 0
    if not event.lora and not salted:
        return [None] * len(event.blocks) if event.tier == Tier.G1 else None
    keys: list[list[str] | None] = [[event.lora] if event.lora else None for _ in event.blocks]
    if event.salt and salted:
        keys[0] = [*(keys[0] or []), event.salt]
    return keys


def _find_salt(event: BlockStored) -> str | None:
    first = event.extra_keys[0] if event.extra_keys else None
    texts = [key for key in first if isinstance(key, str)] if isinstance(first, list) else []
    return next((key for key in reversed(texts) if key != event.lora_name), None)


def _split_token_ids(event: BlockStored) -> list[tuple[int, ...] | None]:
    blocks, size = len(event.block_hashes), event.block_size
    if any(not 0 <= token < 1 << 32 for token in event.token_ids):
        raise MalformedBatch("a token id is not an unsigned 32-bit number")
    if size < 0:
        raise MalformedBatch(f"block_size must be at least 0, got {size}")
    if size == 0 or len(event.token_ids) != blocks * size:
        return [None] * blocks
    return [tuple(event.token_ids[at : at + size]) for at in range(0, blocks * size, size)]


def _local_hashes(event: BlockStored, salt: str | None) -> list[int | None]:
    seed = salt_hash(salt or "", event.lora_name or "")
    text_only = [
        keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys))
        for keys in event.extra_keys or []
    ]
    text_only += [True] * (len(event.block_hashes) - len(text_only))
    return [
        xxh3_64(np.asarray(ids, np.uint32).tobytes(), seed) if ids is not None and hashable else None
        for ids, hashable in zip(_split_token_ids(event), text_only, strict=False)
    ]


def _list_media() -> str:
    return ", ".join(name for name in TIER_OF_MEDIUM if name is not None)
