"""Token ids that come with events, rings that overflow, and arguments that decode refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from events.building import BLOCK_SIZE, chain, drained, hashes, manager_of
from understudy.errors import InvalidArgument
from understudy.events import EventsLost, Removed, Stored, decode
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy._core import EventBatch


def test_token_ids_come_with_the_blocks_when_asked_for() -> None:
    manager = manager_of(4, "vllm", duplicates="keep", event_token_ids=True)
    prompt = TokenBlocks(range(1, 9), BLOCK_SIZE)
    manager.allocate(2).register(prompt.identities, prompt.tokens).release()
    manager.clear_inactive()
    other = TokenBlocks(range(50, 54), BLOCK_SIZE)
    manager.allocate(1).register(other.identities, other.tokens).release()
    manager.allocate(1).register(other.identities, other.tokens).release()
    batch = manager.store.drain_events()
    for stream, copies in (("raw", 2), ("consolidated", 1)):
        events = decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream=stream)  # type: ignore[arg-type]
        tokens = [block.token_ids for event in events if isinstance(event, Stored) for block in event.blocks]
        assert tokens == [(1, 2, 3, 4), (5, 6, 7, 8), *[(50, 51, 52, 53)] * copies]


def test_token_ids_that_do_not_fit_the_block_size_are_refused_and_the_batch_is_kept() -> None:
    manager = manager_of(4, event_token_ids=True)
    prompt = TokenBlocks(range(1, 9), BLOCK_SIZE)
    manager.allocate(2).register(prompt.identities, prompt.tokens).release()
    batch = manager.store.drain_events()
    with pytest.raises(InvalidArgument, match="block_size: 16"):
        decode(batch, dp_rank=0, block_size=16, stream="raw")
    assert len(decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream="raw")) == 1


# --- losses and bad arguments ---------------------------------------------------------------------


def test_a_ring_that_overflowed_says_how_much_is_gone() -> None:
    manager = manager_of(8, event_capacity=3, dp_rank=1)
    run = chain(10, 5)
    manager.allocate(5).register(run).release()
    lost, event = drained(manager)
    assert lost == EventsLost(2, 1)
    assert isinstance(event, Stored)
    assert (event.event_id, event.parent_hash) == (2, run[1].sequence_hash)
    assert hashes(event) == run.sequence_hashes.tolist()[2:]
    manager.clear_inactive()
    assert drained(manager)[0] == EventsLost(2, 1)
    assert drained(manager) == []


def test_a_loss_is_told_even_when_no_row_of_the_stream_is_left() -> None:
    manager = manager_of(8, "vllm", duplicates="keep", event_capacity=1)
    with manager.allocate(1).register(chain(10, 1)), manager.allocate(1).register(chain(10, 1)):
        assert drained(manager) == [EventsLost(1, 0)]


def test_token_ids_of_lost_rows_are_lost_with_them() -> None:
    manager = manager_of(8, event_capacity=2, event_token_ids=True)
    prompt = TokenBlocks(range(1, 17), BLOCK_SIZE)
    manager.allocate(4).register(prompt.identities, prompt.tokens).release()
    lost, event = drained(manager)
    assert lost == EventsLost(2, 0)
    assert isinstance(event, Stored)
    assert [block.token_ids for block in event.blocks] == [(9, 10, 11, 12), (13, 14, 15, 16)]


def test_a_limited_drain_leaves_the_rest_in_the_ring() -> None:
    manager = manager_of(8, event_token_ids=True)
    prompt = TokenBlocks(range(1, 17), BLOCK_SIZE)
    manager.allocate(4).register(prompt.identities, prompt.tokens).release()
    seen: list[int] = []
    for expected in (3, 1, 0):
        batch = manager.store.drain_events(3)
        assert len(batch) == expected
        for event in decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream="raw"):
            assert isinstance(event, Stored)
            seen += [token for block in event.blocks for token in block.token_ids or ()]
    assert seen == list(range(1, 17))


@pytest.mark.parametrize(("argument", "value"), [("stream", "both"), ("dp_rank", -1), ("block_size", 0)])
def test_arguments_out_of_range_are_refused_by_name(argument: str, value: object) -> None:
    batch: EventBatch = manager_of(1).store.drain_events()
    arguments: dict[str, object] = {"dp_rank": 0, "block_size": 4, "stream": "raw", argument: value}
    with pytest.raises(InvalidArgument, match=argument):
        decode(batch, **arguments)  # type: ignore[arg-type]


def test_events_travel_as_messagepack() -> None:
    manager = manager_of(4, event_capacity=4, event_token_ids=True)
    prompt = TokenBlocks(range(1, 13), BLOCK_SIZE)
    manager.allocate(3).register(prompt.identities, prompt.tokens).release()
    manager.clear_inactive()
    events = drained(manager)
    assert [type(event) for event in events] == [EventsLost, Stored, Removed]
    coded = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(coded, type=list[Stored | Removed | EventsLost]) == events
