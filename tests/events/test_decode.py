"""Rows of the ring become events: grouping, anchoring, ids and the two streams."""

from __future__ import annotations

import pytest

from events.building import BLOCK_SIZE, chain, drained, hashes, manager_of, told
from understudy.events import EventsLost, KvEvent, Removed, RemovedBlock, Stored, StoredBlock, decode
from understudy.kv import BlockStore, PoolConfig, Tier
from understudy.tokens import Identities, lineage_hash

# --- grouping -------------------------------------------------------------------------------------


def test_a_chain_registered_at_once_is_one_event_with_everything_in_it() -> None:
    manager = manager_of(4, dp_rank=3)
    run = chain(10, 3)
    manager.allocate(3).register(run).release()
    blocks = tuple(
        StoredBlock(identity.sequence_hash, identity.local_hash, i, i + 1, None)
        for i, identity in enumerate(run)
    )
    assert drained(manager) == [Stored(0, None, blocks, Tier.G1, 3)]
    assert drained(manager) == []


def test_a_suffix_is_anchored_at_its_parent() -> None:
    manager = manager_of(4)
    prefix = chain(10, 2)
    suffix = chain(20, 2, parent=prefix)
    manager.allocate(2).register(prefix).release()
    drained(manager)
    manager.allocate(2).register(suffix).release()
    (event,) = drained(manager)
    assert isinstance(event, Stored)
    assert event.parent_hash == prefix[1].sequence_hash
    assert [block.position for block in event.blocks] == [2, 3]


def test_events_are_the_same_whether_drained_after_each_call_or_at_the_end() -> None:
    run = chain(10, 3)
    streams: list[list[KvEvent]] = []
    for often in (True, False):
        manager = manager_of(4)
        events: list[KvEvent] = []
        for i in range(3):
            manager.allocate(1).register(run[i : i + 1]).release()
            events += drained(manager) if often else []
        for start in (50, 60):
            manager.allocate(2).register(chain(start, 2)).release()
            events += drained(manager) if often else []
        streams.append(events + drained(manager))
    assert streams[0] == streams[1]
    assert [type(event) for event in streams[0]] == [Stored] * 3 + [Removed, Stored] * 2


def test_branches_are_events_of_their_own() -> None:
    manager = manager_of(8)
    root = chain(10, 2)
    left, right = chain(20, 2, parent=root), chain(30, 1, parent=root)
    manager.allocate(5).register(root + left + right).release()
    first, second = drained(manager)
    assert hashes(first) == (root + left).sequence_hashes.tolist()
    assert hashes(second) == right.sequence_hashes.tolist()
    assert isinstance(second, Stored)
    assert second.parent_hash == root[1].sequence_hash
    assert second.event_id == 4


def test_two_prompts_are_two_events_even_at_neighbouring_positions() -> None:
    manager = manager_of(8)
    a, b = chain(10, 1), Identities.from_sequence_hashes([77], parent_hash=5, start_position=1)
    manager.allocate(2).register(a + b).release()
    assert told(drained(manager)) == [("Stored", [a[0].sequence_hash]), ("Stored", [77])]


def test_a_parent_and_a_grandchild_are_not_one_run() -> None:
    manager = manager_of(8)
    far = Identities.from_sequence_hashes([77], parent_hash=chain(10, 1)[0].sequence_hash, start_position=2)
    manager.allocate(2).register(chain(10, 1) + far).release()
    assert len(drained(manager)) == 2


def test_what_the_store_was_not_told_is_none() -> None:
    manager = manager_of(4)
    orphan = Identities.from_lineage_hashes([lineage_hash(77, 5, 3)])
    manager.allocate(1).register(orphan).release()
    assert drained(manager) == [Stored(0, None, (StoredBlock(77, None, 3, 1, None),), Tier.G1, 0)]


def test_evictions_of_one_allocation_are_one_event_in_eviction_order() -> None:
    manager = manager_of(4)
    run = chain(10, 4)
    manager.allocate(4).register(run).release()
    drained(manager)
    with manager.allocate(3) as blocks:
        (event,) = drained(manager)
        assert isinstance(event, Removed)
        assert event.blocks == tuple(
            RemovedBlock(run[i].sequence_hash, i, generation=i + 1) for i in (3, 2, 1)
        )
        assert hashes(event) == blocks.evicted.sequence_hashes.tolist()


def test_removed_comes_before_the_stored_of_the_same_allocation() -> None:
    manager = manager_of(2)
    old, new = chain(10, 2), chain(20, 2)
    manager.allocate(2).register(old).release()
    manager.allocate(2).register(new).release()
    assert told(drained(manager)) == [
        ("Stored", old.sequence_hashes.tolist()),
        ("Removed", old.sequence_hashes.tolist()[::-1]),
        ("Stored", new.sequence_hashes.tolist()),
    ]


def test_going_inactive_and_coming_back_says_nothing() -> None:
    manager = manager_of(2)
    manager.allocate(2).register(chain(10, 2)).release()
    drained(manager)
    manager.match_prefix(chain(10, 2)).release()
    manager.touch(chain(10, 2))
    manager.allocate(0).release()
    assert drained(manager) == []


def test_blocks_that_are_not_cached_or_are_forgotten_are_removed() -> None:
    manager = manager_of(4, "lru")
    blocks = manager.allocate(2).register(chain(10, 2))
    blocks.set_reset_on_release(True)
    blocks.release()
    manager.allocate(1).register(chain(30, 1)).release()
    manager.clear_inactive()
    assert [name for name, _ in told(drained(manager))] == ["Stored", "Removed", "Stored", "Removed"]


def test_the_mocker_trace_is_told_with_its_parents() -> None:
    manager = manager_of(10)
    trunk = chain(100, 5)  # 0 1 2 3 4
    branch = chain(200, 2, parent=trunk[:2])  # 5 6
    late = chain(300, 3, parent=trunk[:3])  # 7 8 9
    other = chain(400, 3)  # 10 11 12
    names = {int(h): i for i, h in enumerate((trunk + branch + late + other).sequence_hashes)}

    first = manager.allocate(5).register(trunk)
    shared = manager.match_prefix(trunk[:2])
    second = manager.allocate(2).register(branch)
    first.release()
    second.release()
    shared.release()
    third = manager.match_prefix(trunk[:3])
    fourth = manager.allocate(3).register(late)
    fifth = manager.allocate(3).register(other)
    sixth = manager.allocate(1)
    assert manager.metrics().inactive_blocks == 0

    seen = []
    for event in drained(manager):
        parent = names.get(event.parent_hash or 0) if isinstance(event, Stored) else None
        seen.append((type(event).__name__, parent, [names[h] for h in hashes(event)]))
    assert seen == [
        ("Stored", None, [0, 1, 2, 3, 4]),
        ("Stored", 1, [5, 6]),
        ("Stored", 2, [7, 8, 9]),
        ("Removed", None, [4, 3, 6]),
        ("Stored", None, [10, 11, 12]),
        ("Removed", None, [5]),
    ]
    for guard in (third, fourth, fifth, sixth):
        guard.release()


# --- ids, tiers, generations ----------------------------------------------------------------------


def two_tiers() -> BlockStore:
    return BlockStore(
        [PoolConfig(4, tier=Tier.G1, policy="lru"), PoolConfig(4, tier=Tier.G2, policy="lru")],
        block_size=BLOCK_SIZE,
        events=True,
    )


def test_ids_rise_strictly_over_all_tiers_and_an_event_stays_on_its_tier() -> None:
    store = two_tiers()
    device, host = store.manager(Tier.G1), store.manager(Tier.G2)
    run = chain(10, 3)
    device.allocate(2).register(run[:2]).release()
    host.allocate(1).register(run[2:]).release()  # continues the run, but elsewhere
    host.allocate(1).register(run[:1]).release()
    device.clear_inactive()
    host.clear_inactive()
    events = drained(store)
    assert [(type(e).__name__, e.event_id, e.tier) for e in events if not isinstance(e, EventsLost)] == [
        ("Stored", 0, Tier.G1),
        ("Stored", 2, Tier.G2),
        ("Stored", 3, Tier.G2),
        ("Removed", 4, Tier.G1),
        ("Removed", 6, Tier.G2),
    ]
    device.allocate(1).register(run[:1]).release()
    (event,) = drained(store)
    assert isinstance(event, Stored)
    assert event.event_id == 8


def test_every_residency_of_a_hash_has_a_higher_generation_and_its_removed_names_it() -> None:
    manager = manager_of(1)
    generations: list[tuple[str, int]] = []
    for _ in range(3):
        manager.allocate(1).register(chain(10, 1)).release()
        manager.clear_inactive()
        for event in drained(manager):
            assert isinstance(event, Stored | Removed)
            generations.append((type(event).__name__, event.blocks[0].generation))
    assert [name for name, _ in generations] == ["Stored", "Removed"] * 3
    numbers = [generation for _, generation in generations]
    assert numbers[0::2] == numbers[1::2]
    assert numbers[0] < numbers[2] < numbers[4]


# --- raw and consolidated -------------------------------------------------------------------------


def test_under_keep_the_raw_stream_tells_of_every_copy_and_the_consolidated_one_of_first_and_last() -> None:
    streams: dict[str, list[tuple[str, int]]] = {}
    for stream in ("raw", "consolidated"):
        manager = manager_of(2, "vllm", duplicates="keep")
        first = manager.allocate(1).register(chain(10, 1))
        second = manager.allocate(1).register(chain(10, 1))
        first.release()
        second.release()
        for _ in range(2):
            manager.allocate(1).register(chain(20, 1)).release()
        events = drained(manager, stream)
        streams[stream] = [(type(e).__name__, e.event_id) for e in events if not isinstance(e, EventsLost)]
    assert streams["raw"] == [
        ("Stored", 0),
        ("Stored", 1),
        ("Removed", 2),
        ("Stored", 3),
        ("Removed", 4),
        ("Stored", 5),
    ]
    # 2: the first of two copies went. 4: the last. 5: a second copy of 20.
    assert streams["consolidated"] == [("Stored", 0), ("Stored", 3), ("Removed", 4)]


@pytest.mark.parametrize("duplicates", ["allow", "reject"])
def test_without_side_by_side_copies_both_streams_are_the_same(duplicates: str) -> None:
    batches = []
    for stream in ("raw", "consolidated"):
        manager = manager_of(4, duplicates=duplicates)
        first = manager.allocate(1).register(chain(10, 1))
        second = manager.allocate(1).register(chain(10, 1))
        first.release()
        second.release()
        manager.allocate(1).register(chain(10, 1)).release()  # the twin is inactive now
        manager.clear_inactive()
        batches.append(drained(manager, stream))
    assert batches[0] == batches[1]
    assert [name for name, _ in told(batches[0])] == ["Stored", "Removed"]


def test_the_consolidated_stream_leaves_out_rows_and_anchors_what_follows() -> None:
    manager = manager_of(8, "vllm", duplicates="keep")
    run = chain(10, 3)
    a = manager.allocate(2).register(run[:2])
    b = manager.allocate(3).register(run)  # 0 and 1 are second copies, 2 is new
    batch = manager.store.drain_events()
    raw = decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream="raw")
    consolidated = decode(batch, dp_rank=0, block_size=BLOCK_SIZE, stream="consolidated")
    assert [hashes(event) for event in raw] == [
        run.sequence_hashes.tolist()[:2],
        run.sequence_hashes.tolist(),
    ]
    first, second = consolidated
    assert hashes(first) == run.sequence_hashes.tolist()[:2]
    assert second == Stored(
        4, run[1].sequence_hash, (StoredBlock(run[2].sequence_hash, 12, 2, 3, None),), Tier.G1, 0
    )
    a.release()
    b.release()
