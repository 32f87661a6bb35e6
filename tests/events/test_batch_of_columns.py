"""Columns of a live stream become the rows that a router receives in a replay."""

from __future__ import annotations

import numpy as np
import pytest

from understudy._core import EventBatch, KvEventBatch, Tier
from understudy.errors import InvalidArgument
from understudy.events import Removed, Stored, decode
from understudy.events.columns import EventColumns, EventKind, build_cleared
from understudy.router import PrefixIndex

COLUMNS = EventColumns.concatenate(
    [
        EventColumns(
            np.array([EventKind.STORED, EventKind.STORED, EventKind.REMOVED], np.uint8),
            np.array([1, 2, 1], np.uint8),
            np.array([0, 7, 0], np.uint64),
            np.array([0, 3, 4, 5]),
            np.array([5, 6, 7, 8, 6], np.uint64),
            np.array([50, 60, 70, 80, 0], np.uint64),
        ),
        build_cleared(),
        EventColumns(
            np.array([EventKind.STORED], np.uint8),
            np.array([1], np.uint8),
            np.array([0], np.uint64),
            np.array([0, 1]),
            np.array([9], np.uint64),
            np.array([90], np.uint64),
        ),
    ]
)


def test_a_batch_has_the_rows_of_its_columns() -> None:
    batch = COLUMNS.to_batch()
    assert batch.kinds.tolist() == [0, 0, 0, 0, 1, 2, 0]
    assert batch.tiers.tolist() == [1, 1, 1, 2, 1, 0, 1]
    assert batch.sequence_hashes.tolist() == [5, 6, 7, 8, 6, 0, 9]
    assert batch.parent_hashes.tolist() == [0, 5, 6, 7, 0, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert batch.starts.tolist() == [1, 0, 0, 1, 1, 1, 1]
    assert batch.sole.all()
    again = EventColumns.from_batch(batch, "consolidated")
    for name in EventColumns.__struct_fields__:
        assert getattr(again, name).tolist() == getattr(COLUMNS, name).tolist(), name


def test_an_index_makes_the_same_of_a_batch_and_of_its_columns() -> None:
    dumps = []
    for events in (COLUMNS, COLUMNS.to_batch()):
        index = PrefixIndex()
        index.store(3, np.array([1], np.uint64))
        index.store(4, np.array([1], np.uint64))
        index.apply(3, events)
        dump = index.dump()
        dumps.append(list(zip(dump.workers.tolist(), dump.hashes.tolist(), strict=True)))
    assert dumps[0] == dumps[1] == [(3, 9), (4, 1)]


def test_a_batch_of_columns_is_decoded_as_any_other() -> None:
    columns = EventColumns(
        COLUMNS.kinds[:3],
        COLUMNS.tiers[:3],
        COLUMNS.parents[:3],
        COLUMNS.offsets[:4],
        COLUMNS.sequence_hashes[:5],
        COLUMNS.local_hashes[:5],
    )
    stored, lower, removed = decode(columns.to_batch(), dp_rank=0, block_size=16, stream="consolidated")
    assert isinstance(stored, Stored)
    assert [block.sequence_hash for block in stored.blocks] == [5, 6, 7]
    assert isinstance(lower, Stored)
    assert lower.tier == Tier.G2
    assert isinstance(removed, Removed)
    with pytest.raises(InvalidArgument, match="a cleared row is of a live worker"):
        decode(COLUMNS.to_batch(), dp_rank=0, block_size=16, stream="consolidated")


def test_columns_that_contradict_themselves_are_refused() -> None:
    c = COLUMNS
    with pytest.raises(InvalidArgument, match="two hashes each"):
        EventBatch.from_columns(
            c.kinds, c.tiers, c.parents, c.offsets, c.sequence_hashes, c.local_hashes[:-1]
        )
    offsets = np.array([0, 3, 4, 5, 6, 6])
    with pytest.raises(InvalidArgument, match="cleared event has no blocks"):
        EventBatch.from_columns(c.kinds, c.tiers, c.parents, offsets, c.sequence_hashes, c.local_hashes)


def test_a_batch_of_a_worker_can_be_made_to_test_a_router() -> None:
    batch = KvEventBatch(2, COLUMNS.to_batch(), pool=1, time_ns=5)
    assert (batch.worker, batch.pool, batch.time_ns, len(batch.events)) == (2, 1, 5, 7)
