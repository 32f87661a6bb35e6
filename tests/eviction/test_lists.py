"""LRU and FIFO: one list of cached blocks, behind a queue of empty ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eviction.driver import Cache

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

BOTH: list[PolicyName] = ["lru", "fifo"]


def cache_of(policy: PolicyName, names: str, num_blocks: int | None = None) -> Cache:
    cache = Cache(policy, num_blocks or len(names.split()))
    for name in names.split():
        cache.chain(name)
    return cache


@pytest.mark.parametrize("policy", BOTH)
def test_the_block_released_first_goes_first(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3") as cache:
        cache.insert("1 2 3")
        assert cache.take(1) == "1"
        assert cache.take(2) == "2 3"


@pytest.mark.parametrize("policy", BOTH)
def test_the_order_is_that_of_release_not_of_registration(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3") as cache:
        cache.store("1 2 3")
        cache.release("3 1 2")
        assert cache.take(3) == "3 1 2"


@pytest.mark.parametrize("policy", BOTH)
def test_looking_does_not_change_the_order(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3") as cache:
        cache.insert("1 2 3")
        assert cache.has("1")
        assert cache.has("2")
        assert cache.manager.prefix_length(cache.known["1"]) == 1
        assert cache.take(2) == "1 2"


@pytest.mark.parametrize("policy", BOTH)
def test_a_hit_takes_a_block_out_and_its_release_makes_it_the_newest(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3") as cache:
        cache.insert("1 2 3")
        assert cache.match("1") == 1
        assert cache.next_out() == "2 3"
        cache.release("1")
        assert cache.next_out() == "2 3 1"


@pytest.mark.parametrize("policy", BOTH)
def test_a_block_goes_inactive_only_with_its_last_reference(policy: PolicyName) -> None:
    with cache_of(policy, "1 2") as cache:
        cache.store("1 2")
        assert cache.match("1") == 1
        cache.release("1")
        cache.release("2")
        assert cache.next_out() == "2"
        cache.release("1")
        assert cache.next_out() == "2 1"


def test_a_touch_refreshes_under_lru_and_not_under_fifo() -> None:
    for policy, expected in (("lru", "2 3 1"), ("fifo", "1 2 3")):
        with cache_of(policy, "1 2 3") as cache:  # type: ignore[arg-type]  # both are policy names
            cache.insert("1 2 3")
            cache.manager.touch(cache.known["1"])
            assert cache.next_out() == expected


@pytest.mark.parametrize("policy", BOTH)
def test_removing_one_leaves_the_others_in_order(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3 4") as cache:
        cache.insert("1 2 3 4")
        assert cache.match("2") == 1
        assert cache.take(3) == "1 3 4"


@pytest.mark.parametrize("policy", BOTH)
def test_insertions_and_removals_interleave(policy: PolicyName) -> None:
    with cache_of(policy, "1 2 3 4 5") as cache:
        cache.insert("1 2 3")
        assert cache.match("1") == 1
        cache.insert("4")
        assert cache.match("3") == 1
        cache.insert("5")
        assert cache.take(3) == "2 4 5"


@pytest.mark.parametrize("policy", BOTH)
def test_a_request_released_tail_first_loses_its_tail_first(policy: PolicyName) -> None:
    with Cache(policy, 3) as cache:
        cache.chain("A0 A1 A2")
        run = cache.known["A0"] + cache.known["A1"] + cache.known["A2"]
        cache.manager.allocate(3).register(run).release()
        assert cache.take(1) == "A2"
        assert cache.manager.prefix_length(run) == 2


@pytest.mark.parametrize("policy", BOTH)
def test_a_request_released_head_first_loses_its_root_first(policy: PolicyName) -> None:
    with Cache(policy, 3) as cache:
        cache.chain("A0 A1 A2")
        run = cache.known["A0"] + cache.known["A1"] + cache.known["A2"]
        cache.manager.allocate(3).register(run).release(tail_first=False)
        assert cache.take(1) == "A0"
        assert cache.manager.prefix_length(run) == 0
