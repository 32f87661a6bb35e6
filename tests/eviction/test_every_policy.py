"""What holds under every built-in policy, whatever its order."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from eviction.driver import Cache
from understudy.errors import CapacityExhausted, ConfigError
from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

EVERY: list[PolicyName] = ["lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append"]


@pytest.fixture(params=EVERY)
def policy(request: pytest.FixtureRequest) -> PolicyName:
    name: PolicyName = request.param
    return name


def filled(policy: PolicyName, count: int) -> Cache:
    """A pool of unrelated cached blocks 1, 2, … and nothing else."""
    cache = Cache(policy, count)
    names = [str(i) for i in range(1, count + 1)]
    for name in names:
        cache.chain(name)
    cache.insert(" ".join(names))
    return cache


def test_inserted_blocks_are_counted_and_found(policy: PolicyName) -> None:
    with filled(policy, 3) as cache:
        assert cache.inactive() == 3
        assert cache.manager.available == 3
        assert all(cache.has(name) for name in "123")
        cache.chain("missing")
        assert not cache.has("missing")


def test_a_match_takes_all_its_hits_out_of_the_order(policy: PolicyName) -> None:
    with filled(policy, 3) as cache:
        assert cache.match("1 2") == 2
        assert cache.order() == "3"


def test_a_match_stops_at_the_first_miss_and_leaves_the_rest_in_place(policy: PolicyName) -> None:
    with filled(policy, 3) as cache:
        cache.chain("missing")
        assert cache.match("1 missing 2") == 1
        assert cache.order() == "2 3"


def test_a_scan_takes_every_hit_out_of_the_order(policy: PolicyName) -> None:
    with filled(policy, 3) as cache:
        cache.chain("missing")
        with cache.manager.scan(cache.known["1"] + cache.known["missing"] + cache.known["3"]) as found:
            assert len(found) == 2
            assert cache.order() == "2"
        assert cache.inactive() == 3


def test_unrelated_blocks_go_in_order_of_release(policy: PolicyName) -> None:
    with filled(policy, 4) as cache:
        assert cache.take(2) == "1 2"
        assert cache.inactive() == 2
        assert cache.take(2) == "3 4"


def test_asking_for_more_than_there_is_evicts_nothing(policy: PolicyName) -> None:
    with filled(policy, 2) as cache:
        before = cache.manager.store.dump()
        with pytest.raises(CapacityExhausted, match=r"3 blocks"):
            cache.manager.allocate(3)
        assert cache.manager.store.dump() == before
        cache.match("1")
        before = cache.manager.store.dump()
        with pytest.raises(CapacityExhausted, match=r"only 1 of 2"):
            cache.manager.allocate(2)
        assert cache.manager.store.dump() == before


def test_the_whole_cache_can_be_evicted_at_once_and_is_empty_then(policy: PolicyName) -> None:
    with filled(policy, 5) as cache:
        assert cache.take(5) == "1 2 3 4 5"
        assert cache.inactive() == 0
        assert cache.take(0) == ""


def test_forgetting_the_cache_leaves_only_empty_blocks(policy: PolicyName) -> None:
    with filled(policy, 3) as cache:
        assert cache.manager.clear_inactive() == 3
        assert cache.order() == ". . ."
        assert cache.manager.clear_inactive() == 0
        assert cache.manager.metrics().evictions == 0


def test_a_limit_shows_the_head_of_the_order(policy: PolicyName) -> None:
    with filled(policy, 5) as cache:
        whole = cache.manager.eviction_order().tolist()
        assert len(whole) == 5
        for limit in range(7):
            assert cache.manager.eviction_order(limit).tolist() == whole[:limit]


def test_the_order_foretells_every_eviction_of_a_random_tree(policy: PolicyName) -> None:
    rng = random.Random(5)
    with Cache(policy, 64, duplicates="keep") as cache:
        cache.chain("0")
        for i in range(1, 200):
            cache.chain(str(i), after=str(rng.randrange(i)) if rng.random() < 0.9 else None)
        for _ in range(300):
            name = str(rng.randrange(200))
            if cache.has(name):
                cache.reuse(name)
            else:
                cache.insert(name)
            cache.manager.store.check()
        foretold = cache.order().replace(". ", "")
        cache.fill()
        assert " ".join(cache.take(1) for _ in range(cache.inactive())) == foretold


@pytest.mark.parametrize("lineage", ["lineage", "lineage_fifo"])
def test_under_lineage_no_eviction_orphans_a_cached_child(lineage: PolicyName) -> None:
    rng = random.Random(6)
    with Cache(lineage, 100) as cache:
        parents: dict[str, str] = {}
        cache.chain("0")
        for i in range(1, 100):
            parents[str(i)] = str(rng.randrange(i))
            cache.chain(str(i), after=parents[str(i)])
        names = [str(i) for i in range(100)]
        rng.shuffle(names)
        cache.insert(" ".join(names))
        left = set(names)
        for _ in range(100):
            gone = cache.take(1)
            left.remove(gone)
            assert not any(parents.get(name) == gone for name in left)


def test_an_unknown_policy_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"mru.*lineage, lineage_fifo, lru, multi_lru, fifo, vllm, vllm_append"
    ):
        BlockManager(4, policy="mru")  # type: ignore[arg-type]


def test_an_object_without_the_methods_of_a_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_freed"):
        BlockManager(4, policy=object())  # type: ignore[arg-type]


def test_two_managers_do_not_share_an_order(policy: PolicyName) -> None:
    a, b = BlockManager(2, policy=policy), BlockManager(2, policy=policy)
    run = Identities.from_local_hashes([5])
    a.allocate(1).register(run).release()
    assert (a.eviction_order().tolist(), b.eviction_order().tolist()) == ([1, 0], [0, 1])
    assert not b.has_blocks(run)[0]
