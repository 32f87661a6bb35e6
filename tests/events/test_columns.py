"""Events as columns say what the events say, and are held to their form."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from events.building import BLOCK_SIZE, chain, manager_of
from understudy.errors import InvalidArgument
from understudy.events import EventColumns, Removed, Stored, decode
from understudy.events.columns import EventKind


def drained() -> Any:
    manager = manager_of(8, "vllm", duplicates="keep")
    run = chain(10, 3)
    first = manager.allocate(2).register(run[:2])
    second = manager.allocate(3).register(run)
    first.release()
    second.release()
    manager.allocate(7).register(chain(50, 7)).release()
    return manager.store.drain_events()


@pytest.mark.parametrize("stream", ["raw", "consolidated"])
def test_columns_hold_what_decoded_events_hold(stream: Any) -> None:
    batch = drained()
    events = decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream=stream)
    columns = EventColumns.from_batch(batch, stream)
    columns.check()
    assert len(columns) == len(events) > 2
    for i, event in enumerate(events):
        assert isinstance(event, Stored | Removed)
        blocks = slice(*columns.offsets[i : i + 2].tolist())
        assert columns.kinds[i] == (EventKind.STORED if isinstance(event, Stored) else EventKind.REMOVED)
        assert columns.tiers[i] == event.tier
        assert columns.sequence_hashes[blocks].tolist() == [block.sequence_hash for block in event.blocks]
        if isinstance(event, Stored):
            assert columns.parents[i] == (event.parent_hash or 0)
            assert columns.local_hashes[blocks].tolist() == [block.local_hash for block in event.blocks]
        else:
            assert not columns.local_hashes[blocks].any()


def test_slices_joined_again_are_the_whole() -> None:
    whole = EventColumns.from_batch(drained(), "raw")
    parts = [whole.slice(i, i + 1) for i in range(len(whole))]
    for part in parts:
        part.check()
    joined = EventColumns.concatenate(parts)
    for name in whole.__struct_fields__:
        assert (getattr(joined, name) == getattr(whole, name)).all()


def test_no_events_are_columns_too() -> None:
    for columns in (
        EventColumns.empty(),
        EventColumns.concatenate([]),
        EventColumns.from_batch(manager_of(1).store.drain_events(), "raw"),
    ):
        columns.check()
        assert len(columns) == columns.num_blocks == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": np.array([3], np.uint8)}, "kinds"),
        ({"tiers": np.array([0], np.uint8)}, "tiers"),
        ({"tiers": np.array([5], np.uint8)}, "tiers"),
        ({"tiers": np.array([1, 1], np.uint8)}, "tiers must be 1 values"),
        ({"parents": np.array([1], np.int64)}, "parents must be 1 values of uint64"),
        ({"offsets": np.array([0, 3], np.int64)}, "offsets"),
        ({"offsets": np.array([1, 2], np.int64)}, "offsets"),
        ({"local_hashes": np.zeros(1, np.uint64)}, "local_hashes must be 2 values"),
        ({"kinds": np.array([EventKind.CLEARED], np.uint8)}, "a cleared event has blocks"),
    ],
)
def test_a_column_that_contradicts_the_others_is_named(change: dict[str, Any], message: str) -> None:
    good = EventColumns(
        np.array([EventKind.STORED], np.uint8),
        np.array([1], np.uint8),
        np.array([0], np.uint64),
        np.array([0, 2], np.int64),
        np.array([5, 6], np.uint64),
        np.array([5, 7], np.uint64),
    )
    good.check()
    with pytest.raises(InvalidArgument, match=message):
        msgspec.structs.replace(good, **change).check()
