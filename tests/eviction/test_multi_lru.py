"""Multi-level LRU, and the sketch of uses that its levels are chosen by."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.driver import Cache
from understudy.errors import ConfigError, InvalidArgument
from understudy.kv import BlockManager, PoolConfig
from understudy.tokens import Identities


def roots(hashes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Identities:
    """Blocks at position 0, one for each hash."""
    return Identities.from_lineage_hashes([int(h) << 54 for h in hashes])


def random_roots(count: int, seed: int = 2024) -> Identities:
    return roots(np.random.default_rng(seed).integers(1, 2**63, count, dtype=np.uint64))


def use(cache: Cache, name: str, times: int) -> None:
    """Brings the estimated uses of a registered block to `times`, its registration included."""
    while cache.manager.frequency(cache.known[name].lineage_hashes[0]) < times:
        cache.manager.touch(cache.known[name])


# --- levels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thresholds", "uses", "expected"),
    [
        # One block at the last count below and the first count of each level, inserted hottest first.
        (None, [15, 14, 8, 7, 3, 2, 1], "1 2 3 7 8 14 15"),
        ([2, 6, 15], [15, 14, 6, 5, 2, 1], "1 2 5 6 14 15"),
        ([1, 2, 3], [3, 2, 1], "1 2 3"),
    ],
)
def test_a_block_goes_to_the_level_of_its_uses(
    thresholds: list[int] | None, uses: list[int], expected: str
) -> None:
    # Within a level the order is that of release: released hottest first, only levels can turn it round.
    with Cache("multi_lru", 8, thresholds=thresholds, sketch_capacity=1024) as cache:
        for count in uses:
            cache.chain(str(count))
        cache.store(" ".join(map(str, uses)))
        for count in uses:
            use(cache, str(count), count)
        cache.release(" ".join(map(str, uses)))
        levels = thresholds or [3, 8, 15]
        in_levels = sorted(uses, key=lambda count: sum(count >= level for level in levels))
        assert cache.next_out().split() == [str(count) for count in in_levels]
        cache.fill()
        assert sorted(cache.take(len(uses)).split(), key=int) == expected.split()


def test_cold_blocks_go_in_order_of_release_and_hot_ones_stay() -> None:
    with Cache("multi_lru", 3, sketch_capacity=1024) as cache:
        for name in ("hot", "cold1", "cold2"):
            cache.chain(name)
        cache.store("hot cold1 cold2")
        use(cache, "hot", 8)
        cache.release("hot cold1 cold2")
        assert cache.take(2) == "cold1 cold2"
        assert cache.has("hot")
        assert cache.take(1) == "hot"


def test_the_level_is_chosen_once_when_the_block_is_released() -> None:
    with Cache("multi_lru", 2, sketch_capacity=1024) as cache:
        cache.chain("A")
        cache.chain("B")
        cache.insert("A B")
        # Uses of A are counted by matches; being matched and released again is what promotes.
        for _ in range(3):
            cache.reuse("A")
        assert cache.next_out() == "B A"
        cache.reuse("B")
        assert cache.next_out() == "B A"
        cache.reuse("B B")
        assert cache.next_out() == "A B"  # both warm now, A released before B


def test_blocks_are_found_on_every_level() -> None:
    with Cache("multi_lru", 4, sketch_capacity=1024) as cache:
        uses = {"a": 1, "b": 3, "c": 8, "d": 15}
        for name in uses:
            cache.chain(name)
        cache.store("a b c d")
        for name, count in uses.items():
            use(cache, name, count)
        cache.release("d c b a")
        assert cache.match("a b c d") == 4
        assert cache.inactive() == 0


def test_all_blocks_may_be_on_one_level() -> None:
    with Cache("multi_lru", 64) as cache:
        names = [f"cold{i}" for i in range(64)]
        for name in names:
            cache.chain(name)
        cache.insert(" ".join(names))
        assert cache.inactive() == 64
        assert cache.next_out().split() == names
        assert cache.take(64).split() == names


def test_eight_blocks_a_level_go_level_by_level() -> None:
    with Cache("multi_lru", 32, sketch_capacity=4096) as cache:
        levels = {"cold": 1, "warm": 3, "hot": 8, "very": 15}
        names = [f"{level}{i}" for i in range(8) for level in ("very", "hot", "warm", "cold")]
        for name in names:
            cache.chain(name)
        cache.store(" ".join(names))
        for name in names:
            use(cache, name, levels[name[:-1]])
        cache.release(" ".join(names))
        expected = [f"{level}{i}" for level in levels for i in range(8)]
        assert cache.next_out().split() == expected
        assert cache.take(32).split() == expected


def test_empty_blocks_go_before_any_cached_one() -> None:
    with Cache("multi_lru", 4) as cache:
        cache.chain("A")
        cache.insert("A")
        assert cache.order() == ". . . A"
        assert cache.take(3) == ""
        assert cache.take(1) == "A"


@pytest.mark.parametrize(
    "thresholds",
    [[0, 8, 15], [3, 3, 15], [8, 3, 15], [3, 15, 15], [3, 8, 16], [3, 8, 300], [3, 8], [1, 2, 3, 4], []],
)
def test_thresholds_must_be_three_and_rise_within_1_to_15(thresholds: list[int]) -> None:
    with pytest.raises(ConfigError, match="thresholds"):
        BlockManager(4, policy="multi_lru", thresholds=thresholds)


@pytest.mark.parametrize("thresholds", [[-1, 8, 15], [3, 8, "15"], 3, [3.5, 8, 15]])
def test_thresholds_must_be_small_integers(thresholds: object) -> None:
    with pytest.raises(InvalidArgument, match="thresholds"):
        BlockManager(4, policy="multi_lru", thresholds=thresholds)  # type: ignore[arg-type]


def test_thresholds_are_refused_by_policies_that_have_no_use_for_them() -> None:
    with pytest.raises(ConfigError, match="thresholds"):
        PoolConfig(4, policy="lru", thresholds=[3, 8, 15])


def test_a_sketch_without_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="sketch_capacity"):
        BlockManager(4, policy="multi_lru", sketch_capacity=0)


# --- the sketch -----------------------------------------------------------------------------------


def test_uses_are_estimated_and_the_unseen_have_none() -> None:
    once, thrice, never = random_roots(3).lineage_hashes
    manager = BlockManager(4, policy="multi_lru", sketch_capacity=1024)
    blocks = manager.allocate(2).register(Identities.from_lineage_hashes([once, thrice]))
    manager.match_prefix(Identities.from_lineage_hashes([thrice])).release()
    manager.scan(Identities.from_lineage_hashes([thrice])).release()
    assert [manager.frequency(h) for h in (once, thrice, never)] == [1, 3, 0]
    blocks.release()


def test_what_counts_as_a_use_and_what_does_not() -> None:
    manager = BlockManager(4, policy="multi_lru", sketch_capacity=1024)
    block = random_roots(1)
    plh = block.lineage_hashes[0]
    manager.touch(block)
    assert manager.frequency(plh) == 0  # it is not here
    held = manager.allocate(1).register(block)
    assert manager.frequency(plh) == 1
    manager.has_blocks(block)
    manager.prefix_length(block)
    manager.scan(block, touch=False).release()
    held.weak().upgrade().release()  # type: ignore[union-attr]  # it is held
    held.clone().release()
    manager.allocate(1).register(block).release()  # a second copy of what is there
    assert manager.frequency(plh) == 1
    manager.match_prefix(block).release()
    manager.match_scattered(block + block)[0].release()
    assert manager.frequency(plh) == 4
    manager.scan(block + block).release()
    manager.touch(block)
    assert manager.frequency(plh) == 7
    held.release()


def test_estimates_saturate_at_fifteen() -> None:
    manager = BlockManager(2, policy="multi_lru", sketch_capacity=1024)
    block = random_roots(1)
    manager.allocate(1).register(block).release()
    for _ in range(40):
        manager.touch(block)
    assert manager.frequency(block.lineage_hashes[0]) == 15


def test_without_a_sketch_there_are_no_estimates() -> None:
    manager = BlockManager(2, policy="lru")
    block = random_roots(1)
    manager.allocate(1).register(block).release()
    manager.touch(block)
    assert manager.frequency(block.lineage_hashes[0]) == 0


def test_a_sketch_may_be_asked_for_without_multi_lru() -> None:
    manager = BlockManager(2, policy="lru", sketch_capacity=64)
    block = random_roots(1)
    manager.allocate(1).register(block).release()
    manager.touch(block)
    assert manager.frequency(block.lineage_hashes[0]) == 2


def test_every_estimate_halves_with_the_use_that_fills_the_sample_and_not_before() -> None:
    capacity = 100
    manager = BlockManager(200, policy="lru", sketch_capacity=capacity)
    blocks = random_roots(200)
    manager.allocate(200).register(blocks).release()  # 200 uses
    for i in range(200, 10 * capacity - 1):
        manager.touch(blocks[i % 80 : i % 80 + 1])
    full = [manager.frequency(h) for h in blocks.lineage_hashes]
    assert 15 not in full  # a saturated use would not have been counted
    assert max(full) >= 8
    manager.touch(blocks[199:])
    halved = [manager.frequency(h) for h in blocks.lineage_hashes]
    full[199] += 1
    assert sum(after == before // 2 for before, after in zip(full, halved, strict=True)) >= 198
    assert max(halved) < 8


def test_four_uses_are_two_after_a_decay() -> None:
    capacity = 4096
    manager = BlockManager(2900, policy="lru", sketch_capacity=capacity)  # 14 uses each: none saturates
    blocks = random_roots(2900)
    known = blocks[:1]
    manager.allocate(len(blocks)).register(blocks).release()
    for _ in range(3):
        manager.touch(known)
    assert manager.frequency(known.lineage_hashes[0]) == 4
    rest = 10 * capacity - len(blocks) - 3
    others = blocks[1:]
    for _ in range(rest // len(others)):
        manager.touch(others)
    manager.touch(others[: rest % len(others) - 1])
    assert manager.frequency(known.lineage_hashes[0]) == 4
    manager.touch(others[-1:])
    assert manager.frequency(known.lineage_hashes[0]) == 2


@pytest.mark.parametrize("capacity", [16_384, 10_000])
def test_keys_used_once_stay_cold_when_there_are_as_many_as_the_sketch_is_made_for(capacity: int) -> None:
    manager = BlockManager(capacity, policy="multi_lru")
    blocks = random_roots(capacity)
    manager.allocate(capacity).register(blocks).release()
    estimates = np.array([manager.frequency(h) for h in blocks.lineage_hashes])
    assert estimates.min() >= 1
    assert (estimates < 3).mean() >= 0.99


def test_keys_numbered_one_by_one_stay_cold_too() -> None:
    manager = BlockManager(16_384, policy="multi_lru")
    blocks = roots(np.arange(1, 16_385, dtype=np.uint64))
    manager.allocate(16_384).register(blocks).release()
    estimates = np.array([manager.frequency(h) for h in blocks.lineage_hashes])
    assert (estimates < 3).mean() >= 0.99
