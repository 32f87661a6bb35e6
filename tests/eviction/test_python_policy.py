"""Policies written in Python: the example of the docs, equality with the native LRU, and broken ones."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eviction.strict import OWN_ORDER, StrictLru
from understudy.errors import CapacityExhausted, PolicyError, WrongState
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


@settings(deadline=None, max_examples=60)
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


# --- broken policies ------------------------------------------------------------------------------


def busy_manager(policy: StrictLru) -> tuple[BlockManager, RegisteredBlocks]:
    """8 blocks: 0 and 1 in use, 2 and 3 cached, the rest empty; the policy knows nothing of the last changes."""
    manager = BlockManager(8, policy=policy, events=True)
    held = manager.allocate(2).register(chain(1, 2))
    manager.allocate(2).register(chain(50, 2)).release()
    return manager, held


BROKEN: dict[str, tuple[object, str]] = {
    "a block in use": ([0, 2, 3], "block 0, which is in use"),
    "a block in use, last": ([3, 2, 1], "block 1, which is in use"),
    "a foreign block": ([4, 5, 8], "block 8, which the pool does not have"),
    "a huge id": ([4, 5, 2**32 - 1], "the pool does not have"),
    "an id past 32 bits": ([4, 5, 2**32], "block ids"),
    "a negative id": ([4, 5, -1], "block ids"),
    "a block twice": ([4, 5, 4], "block 4 twice"),
    "too few": ([4, 5], "named 2"),
    "none at all": ([], "named 0"),
    "too many": ([4, 5, 6, 7], "named 4"),
    "strings": (["4", "5", "6"], "block ids"),
    "floats": ([4.0, 5.0, 6.0], "block ids"),
    "an array of floats": (np.array([4.0, 5.0, 6.0]), "block ids"),
    "an array of two dimensions": (np.array([[4, 5, 6]]), "block ids"),
    "an array with a negative id": (np.array([4, 5, -1]), "block ids"),
    "nothing": (None, "block ids"),
    "one number": (4, "block ids"),
    "a set": ({4, 5, 6}, "block ids"),
}


@pytest.mark.parametrize(("answer", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_a_wrong_answer_is_refused_and_changes_nothing(answer: object, why: str) -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    before = manager.store.dump()
    policy.answer = answer
    for _ in range(2):
        with pytest.raises(PolicyError, match=why):
            manager.allocate(3)
        assert manager.store.dump() == before
    policy.answer = OWN_ORDER
    with manager.allocate(6) as blocks:
        assert blocks.evicted.lineage_hashes == chain(50, 2).lineage_hashes[::-1]
    held.release()
    manager.store.check()
    assert manager.available == 8


@pytest.mark.parametrize(
    "answer",
    [
        np.array([4, 5, 6], dtype=np.int64),
        np.array([4, 5, 6], dtype=np.uint32),
        np.array([4, 0, 5, 0, 6, 0], dtype=np.int32)[::2],
        (4, 5, 6),
        range(4, 7),
        [np.int32(4), np.int64(5), 6],
    ],
)
def test_any_sequence_or_array_of_integers_is_an_answer(answer: object) -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    policy.answer = answer
    with held, manager.allocate(3) as blocks:
        assert blocks.ids.tolist() == [4, 5, 6]


class Unwell(Exception):
    pass


@pytest.mark.parametrize("method", ["on_freed", "on_taken", "select"])
@pytest.mark.parametrize("error", [Unwell, KeyboardInterrupt, MemoryError])
def test_the_error_of_a_policy_reaches_the_caller_and_changes_nothing(
    method: str, error: type[BaseException]
) -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    before = manager.store.dump()

    def fail(name: str) -> None:
        if name == method:
            raise error("out of order")

    policy.hook = fail
    for _ in range(2):
        with pytest.raises(error, match="out of order"):
            manager.allocate(3)
        assert manager.store.dump() == before
    policy.hook = lambda _name: None
    # Whatever the policy had learnt before it failed is not told again: StrictLru would object.
    with manager.allocate(6) as blocks:
        assert len(blocks.evicted) == 2
    held.release()
    manager.store.check()
    assert manager.available == 8


@pytest.mark.parametrize("method", ["on_freed", "on_taken", "select"])
def test_a_policy_that_allocates_from_its_own_pool_is_refused(method: str) -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    before = manager.store.dump()

    def reenter(name: str) -> None:
        if name == method:
            manager.allocate(1)

    policy.hook = reenter
    with pytest.raises(PolicyError, match="must not allocate"):
        manager.allocate(3)
    assert manager.store.dump() == before
    policy.hook = lambda _name: None
    manager.allocate(6).release()
    held.release()
    manager.store.check()


def test_a_policy_that_swallows_the_refusal_still_allocates_nothing_of_its_own() -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)

    def reenter(name: str) -> None:
        with pytest.raises(PolicyError):
            manager.allocate(1)

    policy.hook = reenter
    with held, manager.allocate(3) as blocks:
        assert manager.available == 3
        assert len(blocks) == 3
    policy.hook = lambda _name: None  # the policy and its manager would keep each other alive


def test_a_policy_may_release_and_match_blocks_while_it_is_asked() -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    guards = [held]

    def meddle(name: str) -> None:
        if name == "select" and guards:
            guards.pop().release()
            guards_taken.append(manager.match_prefix(chain(50, 2)))

    guards_taken: list[RegisteredBlocks] = []
    policy.hook = meddle
    with manager.allocate(6) as blocks:
        # The first answer named 50 and 51, which were in use by then; asked again, it named what was free.
        assert blocks.evicted.lineage_hashes == chain(1, 2).lineage_hashes[::-1]
        assert [name for name, _ in policy.calls].count("select") >= 3
    policy.hook = lambda _name: None
    guards_taken.pop().release()
    manager.store.check()


@pytest.mark.parametrize("method", ["on_freed", "on_taken", "select"])
@pytest.mark.parametrize("leaves_it_in_use", [True, False])
def test_a_flood_of_changes_while_the_policy_is_being_told_is_not_lost(
    method: str, leaves_it_in_use: bool
) -> None:
    policy = StrictLru()
    manager, held = busy_manager(policy)
    manager.allocate(1).release()  # now it knows that 0 and 1 are in use, and 2 and 3 are not
    held.release()
    fresh = manager.match_prefix(chain(50, 2))
    kept: list[RegisteredBlocks] = []
    flooded: list[str] = []

    def flood(name: str) -> None:
        if name != method or flooded:
            return
        flooded.append(name)
        fresh.release()
        for _ in range(1000):  # more than the manager keeps without summing up
            manager.match_prefix(chain(1, 2)).release()
            manager.match_prefix(chain(50, 2)).release()
        if leaves_it_in_use:
            kept.extend((manager.match_prefix(chain(1, 2)), manager.match_prefix(chain(50, 2))))

    policy.hook = flood
    with manager.allocate(4) as blocks:
        assert sorted(blocks.ids.tolist()) == [4, 5, 6, 7]
    assert flooded
    manager.allocate(4).release()
    policy.hook = lambda _name: None
    for guard in kept:
        guard.release()
    manager.allocate(8).release()
    manager.store.check()
