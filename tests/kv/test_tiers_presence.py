"""A store with two tiers: one identity, presence for each tier, exact after every step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kv.building import cache, chain, ids, pools, register
from model import block_manager as model
from model.side_by_side import DUPLICATES, NATIVE_POLICIES, DuplicatesName
from model.world import join
from understudy.errors import CapacityExhausted, ConfigError
from understudy.kv import BlockManager, BlockStore, PoolConfig, RegisteredBlocks, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.tokens import Identities


def presence(managers: Sequence[BlockManager], identities: Identities) -> list[list[bool]]:
    return [manager.has_blocks(identities).tolist() for manager in managers]


@pytest.fixture
def store() -> BlockStore:
    return BlockStore([PoolConfig(2, policy="lru"), PoolConfig(3, tier=Tier.G2, policy="fifo")], events=True)


def test_presence_is_told_for_each_tier_through_the_whole_life_of_a_block(store: BlockStore) -> None:
    device, host = store.manager(), store.manager(Tier.G2)
    tiers, block = (device, host), chain(1)
    assert presence(tiers, block) == [[False], [False]]
    on_device = device.allocate(1)
    assert presence(tiers, block) == [[False], [False]]
    staged = on_device.stage(block)
    assert presence(tiers, block) == [[False], [False]]
    registered = staged.register()
    assert presence(tiers, block) == [[True], [False]]
    registered.release()
    assert presence(tiers, block) == [[True], [False]]
    on_host = register(host, block)
    assert presence(tiers, block) == [[True], [True]]
    device.allocate(2).release()
    assert presence(tiers, block) == [[False], [True]]
    on_host.set_reset_on_release(True)
    on_host.release()
    assert presence(tiers, block) == [[False], [False]]


def test_tiers_count_and_evict_on_their_own(store: BlockStore) -> None:
    device, host = store.manager(Tier.G1), store.manager(Tier.G2)
    cache(host, chain(3))
    with register(device, chain(2)) as blocks:
        assert ids(blocks) == [0, 1]  # ids are the tier's own
        assert (device.available, host.available) == (0, 3)
        with pytest.raises(CapacityExhausted, match="tier G1"):
            device.allocate(1)
        with host.allocate(1) as one:
            assert one.evicted.positions.tolist() == [2]
        assert device.prefix_length(chain(3)) == 2
        assert host.prefix_length(chain(3)) == 2
    assert (device.metrics().registrations, host.metrics().registrations) == (2, 3)
    assert (device.metrics().evictions, host.metrics().evictions) == (0, 1)
    assert pools(device) == (0, 2)
    store.check()


def test_a_match_on_one_tier_leaves_the_other_alone(store: BlockStore) -> None:
    device, host = store.manager(), store.manager(Tier.G2)
    cache(device, chain(2))
    cache(host, chain(2))
    order = host.eviction_order().tolist()
    with device.match_prefix(chain(2)):
        assert device.available == 0
        assert host.available == 3
        assert host.eviction_order().tolist() == order
    assert host.metrics().match_hashes_requested == 0


def test_a_block_that_another_tier_has_is_not_a_new_use() -> None:
    store = BlockStore([PoolConfig(4, policy="multi_lru"), PoolConfig(4, tier=Tier.G2)])
    device, host = store.manager(), store.manager(Tier.G2)
    lineage = chain(1)[0].lineage_hash
    cache(device, chain(1))
    cache(host, chain(1))
    assert host.frequency(lineage) == device.frequency(lineage) == 1
    host.match_prefix(chain(1)).release()
    assert device.frequency(lineage) == 2
    host.clear_inactive()
    host.scan(chain(1)).release()  # a miss here, though the other tier has it
    host.match_prefix(chain(1)).release()
    host.touch(chain(1))
    assert device.frequency(lineage) == 2


def test_tiers_of_one_store_may_have_different_policies(store: BlockStore) -> None:
    mixed = BlockStore(
        [
            PoolConfig(4, duplicates="keep", policy="vllm"),
            PoolConfig(4, tier=Tier.G2, duplicates="reject"),
            PoolConfig(4, tier=Tier.G3, reset_on_release=True),
        ]
    )
    tiers = [mixed.manager(tier) for tier in (Tier.G1, Tier.G2, Tier.G3)]
    for tier in tiers:
        for _ in range(2):
            cache(tier, chain(1))
    assert [pools(tier) for tier in tiers] == [(2, 2), (3, 1), (4, 0)]
    assert [tier.tier for tier in tiers] == [Tier.G1, Tier.G2, Tier.G3]
    assert [tier.duplicates for tier in tiers] == ["keep", "reject", "allow"]
    mixed.check()


def test_a_tier_that_the_store_lacks_is_refused(store: BlockStore) -> None:
    with pytest.raises(ConfigError, match="no tier G3"):
        store.manager(Tier.G3)


def test_two_managers_of_one_tier_are_the_same_pool(store: BlockStore) -> None:
    one, other = store.manager(), store.manager(Tier.G1)
    cache(one, chain(2))
    assert other.prefix_length(chain(2)) == 2
    assert other.available == 2
    assert other.metrics().allocations == 2


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("seed", range(4))
def test_presence_equals_a_plain_count_after_every_random_step(duplicates: DuplicatesName, seed: int) -> None:
    rng = random.Random(f"{duplicates} {seed}")
    policies = [rng.choice(NATIVE_POLICIES) for _ in range(2)]
    sizes = [rng.randrange(3, 7) for _ in range(2)]
    store = BlockStore(
        [
            PoolConfig(size, tier=tier, policy=policy, duplicates=duplicates)
            for size, tier, policy in zip(sizes, (Tier.G1, Tier.G2), policies, strict=True)
        ],
        events=True,
        sketch_capacity=2**16,
    )
    managers = [store.manager(Tier.G1), store.manager(Tier.G2)]
    uses = model.Uses()
    models = [
        model.BlockManager(size, policy, duplicates, uses=uses)
        for size, policy in zip(sizes, policies, strict=True)
    ]
    models[0].elsewhere, models[1].elsewhere = [models[1]], [models[0]]
    universe = join([chain(4, 1), chain(3, 2)])
    held: list[tuple[int, RegisteredBlocks]] = []
    resident: set[tuple[int, int]] = set()  # (tier, sequence hash), from the events
    last_id = -1

    for _ in range(150):
        tier = rng.randrange(2)
        manager, slow = managers[tier], models[tier]
        start = rng.randrange(len(universe))
        wanted = universe[start : start + rng.randrange(1, 4)]
        match rng.randrange(5):
            case 0 | 1 if slow.available() >= len(wanted):
                guard = register(manager, wanted)
                blocks, _ = slow.allocate(len(wanted))
                slow.stage(blocks, list(wanted))
                assert ids(guard) == slow.register(blocks)
                held.append((tier, guard))
            case 2:
                guard = manager.match_prefix(wanted)
                assert ids(guard) == slow.match_prefix(list(wanted))
                held.append((tier, guard))
            case _ if held:
                where, guard = held.pop(rng.randrange(len(held)))
                models[where].release(ids(guard)[::-1])
                guard.release()

        store.check()
        assert presence(managers, universe) == [[slow.has(one) for one in universe] for slow in models]
        assert [m.metrics().as_dict() for m in managers] == [slow.metrics() for slow in models]
        assert [m.eviction_order().tolist() for m in managers] == [slow.order.order() for slow in models]
        batch = store.drain_events()
        for event_id, kind, where, sole, sequence_hash in zip(
            batch.ids.tolist(),
            batch.kinds.tolist(),
            batch.tiers.tolist(),
            batch.sole.tolist(),
            batch.sequence_hashes.tolist(),
            strict=True,
        ):
            assert event_id > last_id
            last_id = event_id
            if sole:
                assert ((where, sequence_hash) in resident) == (kind == 1)
                (resident.add if kind == 0 else resident.remove)((where, sequence_hash))
        assert resident == {
            (where, one.sequence_hash)
            for where, slow in enumerate(models, start=1)
            for one in universe
            if slow.has(one)
        }
    for one in universe:
        assert managers[0].frequency(one.lineage_hash) == uses(one.lineage_hash)
    for _, guard in held:
        guard.release()
    assert [manager.available for manager in managers] == sizes
