"""Policies written in Python: the example of the docs, equality with the native LRU, how they are called."""

from __future__ import annotations

import gc
import runpy
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eviction.strict import StrictLru
from understudy.errors import CapacityExhausted, WrongState
from understudy.kv import BlockManager, EvictionPolicy, RegisteredBlocks
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

EXAMPLE = Path(__file__).parents[2] / "examples" / "python_policy.py"


@pytest.fixture(scope="module")
def protected_lru() -> Callable[[AbstractSet[int]], EvictionPolicy]:
    policy: Callable[[AbstractSet[int]], EvictionPolicy] = runpy.run_path(str(EXAMPLE))["ProtectedLru"]
    return policy


def chain(start: int, count: int) -> Identities:
    return Identities.from_local_hashes(range(start, start + count))


# --- the example ----------------------------------------------------------------------------------


def test_the_example_evicts_the_unprotected_blocks_first(
    protected_lru: Callable[[AbstractSet[int]], EvictionPolicy],
) -> None:
    kept = chain(10, 3)
    protected = set(kept.lineage_hashes)
    manager = BlockManager(6, policy=protected_lru(protected))
    manager.allocate(3).register(kept).release()
    manager.allocate(2).register(chain(20, 2)).release()
    with manager.allocate(2) as blocks:
        assert blocks.ids.tolist() == [5, 4]  # the empty one first
        assert blocks.evicted.lineage_hashes == chain(20, 2).lineage_hashes[1:]
    with manager.allocate(4) as blocks:
        # Nothing else is left: the protected go too, tail before head.
        assert blocks.evicted.lineage_hashes == [chain(20, 2).lineage_hashes[0], kept.lineage_hashes[2]]
    assert manager.prefix_length(kept) == 2
    manager.match_prefix(kept).release()
    protected.clear()
    manager.match_prefix(kept).release()  # no longer protected when it is released again
    manager.allocate(4).register(chain(30, 4)).release()
    with manager.allocate(1) as blocks:
        assert blocks.evicted.lineage_hashes == kept.lineage_hashes[1:2]
    manager.store.check()


def test_the_example_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "evicted 2 blocks to make room for 2",
        "system prompt: 4 of 4 blocks cached",
        "other prompt: 0 of 2 blocks cached",
    ]


# --- the same decisions as the native LRU ---------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "drop", "match", "release", "touch", "clear"]),
        st.integers(0, 7),  # which prompt
        st.integers(1, 6),  # how much of it
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=30)
@given(steps=STEPS, duplicates=st.sampled_from(["allow", "reject", "keep"]), strict=st.booleans())
def test_a_python_lru_evicts_what_the_native_one_evicts(
    protected_lru: Callable[[AbstractSet[int]], EvictionPolicy],
    steps: list[tuple[str, int, int]],
    duplicates: str,
    strict: bool,
) -> None:
    policy = StrictLru() if strict else protected_lru(set())
    pair = [
        BlockManager(12, policy=policy, duplicates=duplicates),  # type: ignore[arg-type]
        BlockManager(12, policy="lru", duplicates=duplicates),  # type: ignore[arg-type]
    ]
    held: list[list[RegisteredBlocks]] = []
    try:
        for step, prompt, count in steps:
            run = chain(100 * prompt + 1, count)
            if step == "store" and pair[0].available >= count:
                fresh = [manager.allocate(count) for manager in pair]
                assert fresh[0].ids.tolist() == fresh[1].ids.tolist()
                assert fresh[0].evicted == fresh[1].evicted
                held.append([blocks.register(run) for blocks in fresh])
            elif step == "drop" and pair[0].available >= count:
                for manager in pair:
                    manager.allocate(count).release()
            elif step == "match":
                held.append([manager.match_prefix(run) for manager in pair])
            elif step == "release" and held:
                for blocks in held.pop(prompt % len(held)):
                    blocks.release()
            elif step == "touch":
                for manager in pair:
                    manager.touch(run)
            elif step == "clear":
                assert pair[0].clear_inactive() == pair[1].clear_inactive()
            assert pair[0].available == pair[1].available
        evicted = []
        for manager in pair:
            with manager.allocate(manager.available) as everything:
                evicted.append((everything.ids.tolist(), everything.evicted.lineage_hashes))
        assert evicted[0] == evicted[1]
        for manager in pair:
            manager.store.check()
    finally:
        for guards in held:
            for blocks in guards:
                blocks.release()


# --- how it is called -----------------------------------------------------------------------------


def test_a_policy_is_called_per_batch_and_not_per_block() -> None:
    policy = StrictLru()
    manager = BlockManager(1000, policy=policy)
    assert policy.calls == []  # nothing is asked before an allocation needs it
    blocks = manager.allocate(600)
    assert policy.calls == [("on_freed", 1000), ("select", 600)]
    policy.calls.clear()
    blocks.register(chain(1, 600)).release()
    for _ in range(3):
        manager.match_prefix(chain(1, 600)).release()
    assert policy.calls == []
    manager.allocate(900).release()
    names = [name for name, _ in policy.calls]
    assert names == ["on_taken", "on_freed", *["on_taken", "on_freed"] * 3, "select"]
    manager.allocate(0).release()
    assert len(policy.calls) == len(names)


def test_news_come_in_the_order_in_which_they_happened() -> None:
    policy = StrictLru()
    manager = BlockManager(4, policy=policy)
    manager.allocate(3).register(chain(1, 3)).release()
    manager.touch(chain(1, 3)[2:])
    manager.allocate(1).release()
    # Released tail first; then the tail was touched. That 3 was handed out and is back will be told next time.
    first, second, third = chain(1, 3).lineage_hashes
    assert list(policy.order.items()) == [(3, None), (1, second), (0, first), (2, third)]


def test_changes_that_nobody_asks_about_do_not_pile_up() -> None:
    policy = StrictLru()
    manager = BlockManager(4, policy=policy)
    manager.allocate(3).register(chain(1, 3)).release()
    for _ in range(3000):
        manager.match_prefix(chain(1, 3)).release()
    policy.calls.clear()
    with manager.allocate(2) as blocks:
        assert blocks.evicted == chain(1, 3)[2:]
    assert sum(count for name, count in policy.calls if name != "select") < 4 * 4 + 1024 + 16
    manager.store.check()


def test_the_order_of_a_python_policy_is_its_own_to_tell() -> None:
    manager = BlockManager(4, policy=StrictLru())
    with pytest.raises(WrongState, match="policy"):
        manager.eviction_order()


def test_a_shortage_is_found_without_asking_the_policy() -> None:
    policy = StrictLru()
    manager = BlockManager(4, policy=policy)
    with manager.allocate(3):
        policy.calls.clear()
        with pytest.raises(CapacityExhausted):
            manager.allocate(2)
        assert policy.calls == []


def test_a_policy_lives_as_long_as_its_manager_and_no_longer() -> None:
    alive = []

    class Counted(StrictLru):
        def __init__(self) -> None:
            super().__init__()
            alive.append(self)

        def __del__(self) -> None:
            alive.append(None)  # type: ignore[arg-type]

    manager = BlockManager(4, policy=Counted())
    alive.clear()
    manager.allocate(4).release()
    assert alive == []
    del manager
    gc.collect()
    assert len(alive) == 1


def test_a_policy_and_a_manager_that_hold_each_other_are_collected_together() -> None:
    class Knowing(StrictLru):
        manager: BlockManager

    policy = Knowing()
    policy.manager = BlockManager(4, policy=policy)
    policy.manager.allocate(2).release()
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None
