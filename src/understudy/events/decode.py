"""Decode the rows of a store's event ring, one per block, into events."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, get_args

import numpy as np

from understudy._core import Tier
from understudy.errors import InvalidArgument
from understudy.events.columns import EventKind
from understudy.events.events import (
    FULL_ATTENTION,
    EventsLost,
    KvEvent,
    Removed,
    RemovedBlock,
    Stored,
    StoredBlock,
    Stream,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy._core import EventBatch


def decode(
    batch: EventBatch,
    *,
    dp_rank: int,
    block_size: int,
    stream: Stream,
    groups: Sequence[tuple[str, int | None]] = (),
) -> list[KvEvent]:
    """Group the rows of a drained batch into events, in the order in which they happened.

    Stored rows that continue each other (parent, position and tier) become one `Stored`; Removed rows on one tier
    that follow each other become one `Removed`. An event never spans two calls to the store, so the stream does
    not depend on when it is drained (only a drain's `limit` may split one). Its id is that of its first row:
    ids rise strictly over all tiers, but not by one. A batch that lost rows starts with `EventsLost`.

    `stream="raw"` reports every copy of a block, as vLLM does; `"consolidated"` the first copy to arrive on a
    tier and the last one to leave. They differ only under the duplicate policy `keep`.

    `groups` has the kind and the window of each cache group, if there are several; tokens without a key are left out
    (`decode_ranges` has them). `dp_rank` and `block_size` are the store's. InvalidArgument when the token ids do not
    fit `block_size`, or when an argument is out of range; the batch is not consumed and can be decoded again.
    """
    if stream not in get_args(Stream):
        raise InvalidArgument(f"stream must be 'raw' or 'consolidated', got {stream!r}")
    if dp_rank < 0:
        raise InvalidArgument(f"dp_rank must be at least 0, got {dp_rank}")
    if block_size < 1:
        raise InvalidArgument(f"block_size must be at least 1, got {block_size}")

    if (batch.kinds == EventKind.CLEARED).any():
        raise InvalidArgument("batch: a cleared row is of a live worker, not of a store; read the columns")
    events: list[KvEvent] = [EventsLost(batch.lost, dp_rank)] if batch.lost else []
    rows = np.flatnonzero(batch.kinds != EventKind.SKIPPED if stream == "raw" else batch.sole)
    bounds = _bounds(batch, rows)
    tokens = _token_ids(batch, block_size)
    ids, kinds, tiers = batch.ids[rows].tolist(), batch.kinds[rows].tolist(), batch.tiers[rows].tolist()
    hashes, parents = batch.sequence_hashes[rows].tolist(), batch.parent_hashes[rows].tolist()
    group_of = batch.groups[rows].tolist()
    positions, generations = batch.positions[rows].tolist(), batch.generations[rows].tolist()
    local_hashes = [local or None for local in batch.local_hashes[rows].tolist()]
    token_ids = [tokens.get(row) for row in rows.tolist()]
    for start, stop in pairwise(bounds):
        run = slice(start, stop)
        tier, group = Tier(tiers[start]), group_of[start]
        labels = groups[group] if groups else (FULL_ATTENTION, None)
        if kinds[start] == EventKind.STORED:
            stored = map(
                StoredBlock, hashes[run], local_hashes[run], positions[run], generations[run], token_ids[run]
            )
            events.append(
                Stored(
                    ids[start],
                    parents[start] or None,
                    tuple(stored),
                    tier,
                    dp_rank,
                    group,
                    attention=labels[0],
                    window=labels[1],
                )
            )
        else:
            removed = map(RemovedBlock, hashes[run], positions[run], generations[run])
            events.append(Removed(ids[start], tuple(removed), tier, dp_rank, group))
    return events


def decode_ranges(
    batch: EventBatch, *, dp_rank: int, groups: Sequence[tuple[str, int | None, int]], unit: int
) -> list[Stored | Removed]:
    """Decode the raw rows of an engine with several cache groups as vLLM publishes them.

    A Stored covers a range of tokens (`covered`: its units of hashing, of `unit` tokens), of which `blocks` may name
    none. `groups` has the kind, the window and the block size of each group. Host rows name chunks of vLLM's offload.
    """
    kinds, ids = batch.kinds.tolist(), batch.ids.tolist()
    hashes, parents = batch.sequence_hashes.tolist(), batch.parent_hashes.tolist()
    local, positions = batch.local_hashes.tolist(), batch.positions.tolist()
    generations, group_of = batch.generations.tolist(), batch.groups.tolist()
    tiers = batch.tiers.tolist()
    bounds = [*np.flatnonzero(batch.starts).tolist(), len(batch)]
    events: list[Stored | Removed] = []
    for start, stop in pairwise(bounds):
        group = group_of[start]
        if kinds[start] == EventKind.REMOVED:
            removed = tuple(
                RemovedBlock(hashes[row], positions[row], generations[row]) for row in range(start, stop)
            )
            events.append(Removed(ids[start], removed, Tier(tiers[start]), dp_rank, group))
            continue
        kind, window, size = groups[group]
        named = tuple(
            StoredBlock(hashes[row], local[row] or None, positions[row], generations[row], None)
            for row in range(start, stop)
            if kinds[row] == EventKind.STORED
        )
        if tiers[start] != Tier.G1:  # a chunk of vLLM's offload, whose hash alone is published
            events.append(Stored(ids[start], None, named, Tier(tiers[start]), dp_rank, group))
            continue
        events.append(
            Stored(
                ids[start],
                parents[start] or None,
                named,
                Tier.G1,
                dp_rank,
                group,
                attention=kind,
                window=window,
                covered=tuple(hashes[start:stop]),
                block_size=unit if stop - start == 1 else size,
            )
        )
    return events


def _bounds(batch: EventBatch, rows: npt.NDArray[np.intp]) -> list[int]:
    """Return the index in `rows` where each event begins, and the end of the last."""
    if len(rows) == 0:
        return []
    before, after = rows[:-1], rows[1:]
    kinds, tiers, positions, groups = batch.kinds, batch.tiers, batch.positions, batch.groups
    calls = np.cumsum(batch.starts, dtype=np.int64)  # not the flag itself: its row may be left out
    alike = (
        (kinds[before] == kinds[after]) & (tiers[before] == tiers[after]) & (calls[before] == calls[after])
    )
    alike &= groups[before] == groups[after]
    child = batch.parent_hashes[after] == batch.sequence_hashes[before]
    child &= positions[after] == positions[before] + 1
    cuts = np.flatnonzero(~(alike & (child | (kinds[after] != EventKind.STORED)))) + 1
    return [0, *cuts.tolist(), len(rows)]


def _token_ids(batch: EventBatch, block_size: int) -> dict[int, tuple[int, ...]]:
    """Return token ids by row of the batch; empty when the store keeps none."""
    flat = batch.token_ids
    if len(flat) == 0:
        return {}
    rows = np.flatnonzero(batch.kinds == EventKind.STORED).tolist()
    if len(flat) != len(rows) * block_size:
        raise InvalidArgument(
            f"block_size: {block_size} does not fit {len(flat)} token ids of {len(rows)} stored blocks; "
            "give the block size of the store"
        )
    return dict(zip(rows, map(tuple, flat.reshape(-1, block_size).tolist()), strict=True))
