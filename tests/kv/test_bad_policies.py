"""Policies written in Python that break their contract: reported, and nothing is handed out."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kv.building import cache, chain, ids, refused, register
from model.eviction import AsPolicy, Lru
from understudy.errors import PolicyError, WrongState
from understudy.kv import BlockManager

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


class Scripted(AsPolicy):
    """LRU, unless it is told what to answer."""

    def __init__(self) -> None:
        super().__init__(Lru())
        self.answer: Any = None
        self.news: list[tuple[str, list[int]]] = []
        self.fail_on: str | None = None

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        self.tell("freed", blocks)
        super().on_freed(blocks, lineage_hashes)

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        self.tell("taken", blocks)
        super().on_taken(blocks)

    def tell(self, what: str, blocks: npt.NDArray[np.int32]) -> None:
        if self.fail_on == what:
            raise RuntimeError(f"cannot hear of {what}")
        self.news.append((what, blocks.tolist()))

    def select(self, count: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return super().select(count) if self.answer is None else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "was asked for 2 blocks and named 0"),
        ([3], "was asked for 2 blocks and named 1"),
        ([3, 4, 5], "was asked for 2 blocks and named 3"),
        ([3, 3], "named block 3 twice"),
        ([3, 0], "named block 0, which is in use"),
        ([3, 8], "named block 8, which the pool does not have"),
        ([3, 2**32 - 1], "named block 4294967295, which the pool does not have"),
        ([3, -1], "must be 0 to 4294967295, got -1"),
        ([3, 2**70], r"block ids\[1\]"),
        ([3, 4.0], "must be an int, got 4.0"),
        (["3", "4"], "must be an int, got '3'"),
        (7, "must be a sequence"),
        (np.zeros((1, 2), np.int64), "one dimension"),
    ],
)
def test_a_policy_that_names_wrong_blocks_is_reported_and_nothing_is_handed_out(
    answer: Any, message: str
) -> None:
    policy = Scripted()
    manager = BlockManager(8, policy=policy)
    with register(manager, chain(2)) as held:
        policy.answer = answer
        refused(manager.store, PolicyError, message, lambda: manager.allocate(2))
        assert ids(held) == [0, 1]
        policy.answer = None
        with manager.allocate(2) as blocks:
            assert blocks.ids.tolist() == [2, 3]
    assert manager.available == 8


def test_what_a_policy_raises_reaches_the_caller_and_nothing_is_handed_out() -> None:
    policy = Scripted()
    manager = BlockManager(4, policy=policy)
    policy.answer = KeyError("lost")
    refused(manager.store, KeyError, "lost", lambda: manager.allocate(1))
    policy.answer = None
    with manager.allocate(4) as blocks:
        assert blocks.ids.tolist() == [0, 1, 2, 3]


def test_news_that_a_policy_failed_to_take_are_told_again_and_none_twice() -> None:
    policy = Scripted()
    manager = BlockManager(4, policy=policy)
    with manager.allocate(2):
        pass
    policy.news.clear()
    policy.fail_on = "freed"  # it hears that blocks were taken, and fails to hear that they were freed
    refused(manager.store, RuntimeError, "cannot hear of freed", lambda: manager.allocate(1))
    policy.fail_on = None
    with manager.allocate(1) as blocks:
        assert blocks.ids.tolist() == [2]
        assert policy.news == [("taken", [0, 1]), ("freed", [1, 0])]


class Looking(Scripted):
    """Calls back into the pool it chooses for."""

    def __init__(self, call: Callable[[BlockManager], object]) -> None:
        super().__init__()
        self.pool: BlockManager | None = None
        self.call = call
        self.seen: list[object] = []

    def select(self, count: int) -> Any:
        assert self.pool is not None
        self.seen.append(self.call(self.pool))
        return super().select(count)


def test_a_policy_that_allocates_from_its_own_pool_is_refused() -> None:
    policy = Looking(lambda pool: pool.allocate(1))
    policy.pool = manager = BlockManager(4, policy=policy)
    refused(manager.store, PolicyError, "must not allocate from its own pool", lambda: manager.allocate(1))
    policy.pool = None


def test_a_policy_may_look_at_its_pool_while_it_chooses() -> None:
    policy = Looking(lambda pool: (pool.available, pool.prefix_length(chain(2))))
    policy.pool = manager = BlockManager(4, policy=policy)
    cache(manager, chain(2))
    manager.allocate(3).release()
    assert policy.seen == [(4, 0), (4, 2)]
    policy.pool = None


def test_the_order_of_a_python_policy_is_its_own_secret() -> None:
    manager = BlockManager(4, policy=Scripted())
    refused(manager.store, WrongState, "known to its policy alone", manager.eviction_order)


def test_a_policy_that_refers_to_its_manager_is_collected_with_it() -> None:
    policy = Looking(lambda pool: pool.available)
    policy.pool = manager = BlockManager(4, policy=policy)
    cache(manager, chain(2))
    gone = weakref.ref(policy)
    del policy, manager
    gc.collect()
    assert gone() is None


def test_collecting_garbage_leaves_a_policy_in_use_alone() -> None:
    policy = Looking(lambda pool: pool.available)
    manager = BlockManager(4, policy=policy)
    policy.pool = manager
    store = manager.store
    with manager.allocate(1):
        del policy
        gc.collect()
        manager.allocate(3).release()
    del manager
    gc.collect()
    store.check()
