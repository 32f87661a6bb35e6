"""What the store tells its subscribers: blocks that appeared and blocks that left."""

from __future__ import annotations

import pytest

from kv.building import cache, chain, ids, register, roots
from understudy.errors import InvalidArgument, WrongState
from understudy.kv import BlockManager, BlockStore, PoolConfig, Tier
from understudy.tokens import TokenBlocks

STORED, REMOVED = 0, 1


def test_a_registered_block_is_announced_with_everything_a_router_needs() -> None:
    manager = BlockManager(8, block_size=4, events=True, dp_rank=3)
    tokens = TokenBlocks(range(1, 13), 4).identities
    with register(manager, tokens):
        batch = manager.store.drain_events()
    assert len(batch) == 3
    assert batch.kinds.tolist() == [STORED] * 3
    assert batch.tiers.tolist() == [1, 1, 1]
    assert batch.sole.tolist() == [1, 1, 1]
    assert batch.positions.tolist() == [0, 1, 2]
    assert batch.sequence_hashes.tolist() == [
        14643705804678351452,
        4945711292740353085,
        12583592247330656132,
    ]
    assert batch.local_hashes.tolist() == [14643705804678351452, 16777012769546811212, 483935686894639516]
    assert batch.parent_hashes.tolist() == [0, 14643705804678351452, 4945711292740353085]
    assert batch.token_ids.tolist() == []
    assert manager.store.dp_rank == 3


def test_being_cached_and_matched_again_is_no_event() -> None:
    manager = BlockManager(8, events=True)
    cache(manager, chain(3))
    manager.store.drain_events()
    with manager.match_prefix(chain(3)) as blocks, blocks.clone():
        pass
    manager.touch(chain(3))
    assert len(manager.store.drain_events()) == 0


def test_eviction_is_announced_in_its_order_and_before_the_blocks_that_follow() -> None:
    manager = BlockManager(3, events=True)
    cache(manager, chain(3, 1))
    cache(manager, chain(2, 2))
    batch = manager.store.drain_events()
    assert batch.kinds.tolist() == [STORED] * 3 + [REMOVED] * 2 + [STORED] * 2
    assert batch.positions.tolist() == [0, 1, 2, 2, 1, 0, 1]
    assert batch.ids.tolist() == sorted(set(batch.ids.tolist()))
    assert batch.sequence_hashes[3:5].tolist() == chain(3, 1).sequence_hashes[::-1][:2].tolist()


def test_an_emptied_block_is_announced_as_removed() -> None:
    manager = BlockManager(3, events=True)
    with register(manager, chain(1)) as blocks:
        blocks.set_reset_on_release(True)
    assert manager.store.drain_events().kinds.tolist() == [STORED, REMOVED]


def test_blocks_that_were_never_registered_are_never_announced() -> None:
    manager = BlockManager(4, events=True)
    manager.allocate(2).release()
    manager.allocate(2).stage(chain(2)).release()
    assert len(manager.store.drain_events()) == 0


def test_each_residency_of_a_hash_has_a_higher_generation() -> None:
    manager = BlockManager(1, events=True)
    for seed in (1, 2, 1, 2, 1):
        cache(manager, chain(1, seed))
    batch = manager.store.drain_events()
    of_one = batch.sequence_hashes == chain(1, 1).sequence_hashes[0]
    assert batch.kinds[of_one].tolist() == [STORED, REMOVED, STORED, REMOVED, STORED]
    generations = batch.generations[of_one].tolist()
    assert generations[0] == generations[1] < generations[2] == generations[3] < generations[4]


def test_events_are_drained_oldest_first_in_portions() -> None:
    manager = BlockManager(8, events=True)
    cache(manager, chain(5))
    assert len(manager.store.drain_events(0)) == 0
    portions = [manager.store.drain_events(2) for _ in range(4)]
    assert [portion.positions.tolist() for portion in portions] == [[0, 1], [2, 3], [4], []]
    drained = [event_id for portion in portions for event_id in portion.ids.tolist()]
    assert drained == sorted(set(drained))


def test_a_bounded_ring_forgets_the_oldest_and_says_how_many() -> None:
    manager = BlockManager(16, events=True, event_capacity=3)
    cache(manager, roots(3, 1))
    batch = manager.store.drain_events()
    assert (len(batch), batch.lost) == (3, 0)
    last = batch.ids.tolist()[-1]
    cache(manager, roots(8, 2))
    batch = manager.store.drain_events()
    assert (len(batch), batch.lost) == (3, 5)
    assert batch.sequence_hashes.tolist() == roots(8, 2).sequence_hashes[5:].tolist()
    assert batch.ids.tolist() == [last + 6, last + 7, last + 8]  # ids count what was lost
    assert manager.store.drain_events().lost == 0


def test_without_events_nothing_is_recorded() -> None:
    manager = BlockManager(4)
    cache(manager, chain(4))
    cache(manager, chain(4, 2))
    batch = manager.store.drain_events()
    assert (len(batch), batch.lost) == (0, 0)


# --- token ids ------------------------------------------------------------------------------------


def test_token_ids_travel_with_stored_events_only() -> None:
    manager = BlockManager(2, block_size=4, events=True, event_token_ids=True)
    tokens = TokenBlocks(range(1, 9), 4)
    manager.allocate(2).register(tokens.identities, token_ids=tokens.tokens).release()
    more = TokenBlocks(range(100, 104), 4)
    manager.allocate(1).stage(more.identities).register(token_ids=list(more.tokens)).release()
    batch = manager.store.drain_events()
    assert batch.kinds.tolist() == [STORED, STORED, REMOVED, STORED]
    assert batch.token_ids.tolist() == [*range(1, 9), *range(100, 104)]


def test_token_ids_follow_their_events_through_portions_and_losses() -> None:
    manager = BlockManager(8, block_size=2, events=True, event_token_ids=True, event_capacity=3)
    blocks = manager.allocate(5).register(chain(5), token_ids=list(range(10)))
    batch = manager.store.drain_events(1)
    assert (batch.lost, batch.positions.tolist(), batch.token_ids.tolist()) == (2, [2], [4, 5])
    batch = manager.store.drain_events()
    assert (batch.lost, batch.positions.tolist(), batch.token_ids.tolist()) == (0, [3, 4], [6, 7, 8, 9])
    blocks.release()


def test_a_removed_event_that_is_lost_takes_no_tokens_with_it() -> None:
    manager = BlockManager(1, block_size=1, events=True, event_token_ids=True, event_capacity=2)
    for seed in (1, 2, 3):  # stored 1, removed 1, stored 2, removed 2, stored 3
        manager.allocate(1).register(chain(1, seed), token_ids=[seed]).release()
    batch = manager.store.drain_events()
    assert (batch.lost, batch.kinds.tolist(), batch.token_ids.tolist()) == (3, [REMOVED, STORED], [3])


@pytest.mark.parametrize("duplicates", ["allow", "reject"])
def test_a_block_that_is_already_there_sends_no_tokens(duplicates: str) -> None:
    manager = BlockManager(
        4,
        block_size=1,
        events=True,
        event_token_ids=True,
        duplicates=duplicates,  # type: ignore[arg-type]
    )
    for tokens in ([5], [6]):
        manager.allocate(1).register(chain(1), token_ids=tokens).release()
    assert manager.store.drain_events().token_ids.tolist() == [5]


@pytest.mark.parametrize("given", [None, [], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_missing_or_miscounted_token_ids_are_refused_and_nothing_is_registered(
    given: list[int] | None,
) -> None:
    manager = BlockManager(4, block_size=2, events=True, event_token_ids=True)
    blocks = manager.allocate(2)
    before = manager.store.dump()
    with pytest.raises(InvalidArgument, match="token_ids must hold 4 tokens for 2 blocks of 2"):
        blocks.register(chain(2), token_ids=given)
    assert manager.store.dump() == before
    staged = blocks.stage(chain(2))
    before = manager.store.dump()
    with pytest.raises(InvalidArgument, match="token_ids must hold 4 tokens"):
        staged.register(token_ids=given)
    assert manager.store.dump() == before
    with staged.register(token_ids=[1, 2, 3, 4]) as registered:
        assert ids(registered) == [0, 1]


def tiered(device: int = 2, host: int = 4) -> tuple[BlockStore, BlockManager, BlockManager]:
    store = BlockStore(
        [PoolConfig(device), PoolConfig(host, tier=Tier.G2)], block_size=2, events=True, event_token_ids=True
    )
    return store, store.manager(), store.manager(Tier.G2)


def test_a_copy_on_another_tier_has_the_token_ids_of_its_block_and_brings_them_back() -> None:
    store, device, host = tiered()
    names, others = chain(2), chain(2, 2)
    device.allocate(2).register(names, token_ids=[1, 2, 3, 4]).release()
    host.allocate(2).register(names).release()  # written through
    device.allocate(2).register(others, token_ids=[5, 6, 7, 8]).release()  # evicts them above
    device.allocate(2).register(names).release()  # brought back
    batch = store.drain_events()
    rows = list(zip(batch.tiers[batch.kinds == STORED], batch.token_ids.reshape(-1, 2).tolist(), strict=True))
    assert rows == [
        (1, [1, 2]),
        (1, [3, 4]),
        (2, [1, 2]),
        (2, [3, 4]),
        (1, [5, 6]),
        (1, [7, 8]),
        (1, [1, 2]),
        (1, [3, 4]),
    ]


def test_what_is_copied_down_as_it_is_evicted_keeps_its_token_ids_every_time() -> None:
    store, device, host = tiered(device=1, host=2)
    first, second = chain(1), chain(1, 2)
    device.allocate(1).register(first, token_ids=[1, 2]).release()
    for name, tokens in ((second, [3, 4]), (first, None), (second, None), (first, None)):
        room = device.allocate(1)
        assert len(room.evicted) == 1
        host.allocate(1).register(room.evicted, token_ids=room.evicted_token_ids).release()
        room.register(name, token_ids=tokens).release()
    batch = store.drain_events()
    down = batch.token_ids.reshape(-1, 2)[batch.tiers[batch.kinds == STORED] == 2].tolist()
    assert down == [[1, 2], [3, 4], [1, 2], [3, 4]]  # the latter two came back up before
    up = batch.token_ids.reshape(-1, 2)[batch.tiers[batch.kinds == STORED] == 1].tolist()
    assert up == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]


def test_staged_blocks_find_the_token_ids_of_their_copies_too_and_a_block_that_is_nowhere_needs_them() -> (
    None
):
    store, device, host = tiered()
    device.allocate(1).register(chain(1), token_ids=[1, 2]).release()
    host.allocate(1).stage(chain(1)).register().release()
    assert store.drain_events().token_ids.tolist() == [1, 2, 1, 2]
    staged = host.allocate(2).stage(chain(2))
    before = store.dump()
    with pytest.raises(
        InvalidArgument, match="token_ids must hold 4 tokens for 2 blocks of 2, got none, and no tier"
    ):
        staged.register()
    assert store.dump() == before
    staged.release()


def test_a_store_whose_events_carry_no_token_ids_keeps_none() -> None:
    store = BlockStore([PoolConfig(1), PoolConfig(1, tier=Tier.G2)], block_size=2, events=True)
    device = store.manager()
    device.allocate(1).register(chain(1), token_ids=[1, 2]).release()
    room = device.allocate(1)
    assert (len(room.evicted), room.evicted_token_ids.tolist()) == (1, [])
    room.release()


def test_token_ids_survive_an_offload_into_another_store_and_another_one_after_they_came_back() -> None:
    store, _, host = tiered(host=2)
    disk = BlockStore([PoolConfig(8, tier=Tier.G3)], block_size=2, events=True, event_token_ids=True)
    below = disk.manager(Tier.G3)
    names = chain(2)
    host.allocate(2).register(names, token_ids=[1, 2, 3, 4]).release()
    for others in (chain(2, 2), chain(2, 4)):
        with host.match_prefix(names) as held:  # copied while it is still there
            below.allocate(2).register(held.identities, token_ids=held.token_ids).release()
        host.allocate(2).register(others, token_ids=[5, 6, 7, 8]).release()  # pushes it out
        with below.match_prefix(names) as held:  # and it comes back
            host.allocate(2).register(held.identities, token_ids=held.token_ids).release()
        below.clear_inactive()
    told = disk.drain_events()
    assert told.token_ids.tolist() == [1, 2, 3, 4] * 2
    assert store.drain_events().token_ids.tolist() == [1, 2, 3, 4, *([5, 6, 7, 8, 1, 2, 3, 4] * 2)]


def test_token_ids_are_those_of_blocks_that_are_held_in_their_order() -> None:
    _, device, _ = tiered()
    held = device.allocate(2).register(chain(2), token_ids=[1, 2, 3, 4])
    tail = held.take(1)
    assert (held.token_ids.tolist(), tail.token_ids.tolist()) == ([3, 4], [1, 2])
    held.release()
    with pytest.raises(WrongState):
        _ = held.token_ids
    tail.release()
    plain = BlockManager(1, block_size=2, events=True)
    with plain.allocate(1).register(chain(1)) as held:
        assert held.token_ids.tolist() == []


# --- tiers ----------------------------------------------------------------------------------------


def test_ids_increase_over_all_tiers_of_a_store_and_rows_name_their_tier() -> None:
    store = BlockStore([PoolConfig(2), PoolConfig(4, tier=Tier.G2)], events=True)
    device, host = store.manager(), store.manager(Tier.G2)
    cache(device, chain(2))
    cache(host, chain(2))
    cache(device, chain(2, 2))
    batch = store.drain_events()
    assert batch.ids.tolist() == sorted(set(batch.ids.tolist()))
    assert batch.tiers.tolist() == [1, 1, 2, 2, 1, 1, 1, 1]
    assert batch.kinds.tolist() == [STORED] * 4 + [REMOVED] * 2 + [STORED] * 2
    assert batch.sole.tolist() == [1] * 8  # first and last copies are counted for each tier apart
