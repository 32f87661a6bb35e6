"""Python policies that answer wrongly, fail, or meddle with the pool while they are asked."""

from __future__ import annotations

import numpy as np
import pytest

from eviction.strict import OWN_ORDER, StrictLru
from understudy.errors import PolicyError
from understudy.kv import BlockManager, RegisteredBlocks
from understudy.tokens import Identities


def chain(start: int, count: int) -> Identities:
    return Identities.from_local_hashes(range(start, start + count))


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
