"""Guards: context managers, release in every state, and the safety net below them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest

from kv.building import AnyGuard, cache, chain, ids, pools, register
from understudy.errors import WrongState
from understudy.kv import BlockManager

Maker = Callable[[BlockManager], AnyGuard]


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8)


MAKERS: dict[str, Maker] = {
    "mutable": lambda manager: manager.allocate(3),
    "staged": lambda manager: manager.allocate(3).stage(chain(3)),
    "registered": lambda manager: register(manager, chain(3)),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


# --- context managers -----------------------------------------------------------------------------


def test_the_end_of_a_with_block_gives_the_blocks_back(manager: BlockManager, make: Maker) -> None:
    guard = make(manager)
    with guard as inside:
        assert inside is guard
        assert len(guard) == 3
        assert manager.available == 5
    assert guard.released
    assert (len(guard), guard.ids.tolist()) == (0, [])
    assert manager.available == 8


def test_an_exception_gives_the_blocks_back_and_goes_on(manager: BlockManager, make: Maker) -> None:
    with pytest.raises(ZeroDivisionError), make(manager):
        _ = 1 // 0
    assert manager.available == 8


def test_release_is_idempotent_in_every_state(manager: BlockManager, make: Maker) -> None:
    guard = make(manager)
    for _ in range(3):
        guard.release()
        assert guard.released
        assert manager.available == 8
        with guard:
            pass


def test_releasing_inside_the_with_block_is_fine(manager: BlockManager, make: Maker) -> None:
    with make(manager) as guard:
        guard.release()
    assert manager.available == 8


def test_a_guard_whose_blocks_moved_on_is_released_and_releases_nothing(manager: BlockManager) -> None:
    with manager.allocate(3) as mutable, mutable.stage(chain(3)) as staged, staged.register() as registered:
        assert (mutable.released, staged.released, registered.released) == (True, True, False)
        mutable.release()
        staged.release()
        assert manager.metrics().active_references == 3
    assert pools(manager) == (5, 3)


def test_a_call_on_a_released_guard_is_refused_and_changes_nothing(manager: BlockManager) -> None:
    mutable = manager.allocate(1)
    mutable.release()
    staged = manager.allocate(1).stage(chain(1))
    staged.release()
    registered = register(manager, chain(1))
    registered.release()
    calls: list[Callable[[], object]] = [
        lambda: mutable.stage(chain(1)),
        lambda: mutable.register(chain(1)),
        lambda: mutable.take(0),
        staged.register,
        staged.reset,
        registered.clone,
        registered.weak,
        lambda: registered.take(0),
        lambda: registered.set_reset_on_release(True),
    ]
    before = manager.store.dump()
    for call in calls:
        with pytest.raises(WrongState, match="released or handed on"):
            call()
        assert manager.store.dump() == before


def test_a_released_guard_still_tells_what_it_held(manager: BlockManager) -> None:
    with register(manager, chain(3)) as blocks:
        pass
    assert blocks.identities == chain(3)
    assert blocks.ids.tolist() == []


# --- splitting ------------------------------------------------------------------------------------


def test_take_moves_the_first_blocks_into_a_guard_of_their_own(manager: BlockManager) -> None:
    blocks = register(manager, chain(4))
    head = blocks.take(3)
    assert (ids(head), ids(blocks)) == ([0, 1, 2], [3])
    assert (head.identities, blocks.identities) == (chain(4)[:3], chain(4)[3:])
    assert manager.metrics().active_references == 4
    head.release()
    assert pools(manager) == (4, 3)
    rest = blocks.take(1)
    assert (ids(rest), len(blocks), blocks.released) == ([3], 0, False)
    blocks.release()
    assert manager.metrics().active_references == 1
    rest.release()


def test_taking_no_block_gives_an_empty_guard(manager: BlockManager) -> None:
    with manager.allocate(2) as blocks, blocks.take(0) as nothing:
        assert (len(nothing), len(blocks)) == (0, 2)


def test_mutable_blocks_can_be_staged_in_parts(manager: BlockManager) -> None:
    blocks = manager.allocate(3)
    with blocks.take(2).stage(chain(2)) as first, blocks.stage(chain(3)[2:]) as last:
        assert (first.ids.tolist(), last.ids.tolist()) == ([0, 1], [2])


# --- the safety net -------------------------------------------------------------------------------


def drop(guards: list[AnyGuard]) -> None:
    """Lose them, without release."""
    guards.clear()
    gc.collect()


def test_a_dropped_guard_warns_returns_its_blocks_and_is_counted(manager: BlockManager, make: Maker) -> None:
    guards = [make(manager)]
    with pytest.warns(ResourceWarning, match=r"3 blocks were dropped without release\(\)"):
        drop(guards)
    assert manager.available == 8
    assert manager.metrics().leaked_guards == 1
    manager.store.check()


def test_a_leaked_registered_guard_leaves_its_blocks_cached(manager: BlockManager) -> None:
    guards: list[AnyGuard] = [register(manager, chain(3))]
    with pytest.warns(ResourceWarning):
        drop(guards)
    assert pools(manager) == (5, 3)


def test_a_leak_is_counted_once_for_each_guard(manager: BlockManager) -> None:
    guards: list[AnyGuard] = [manager.allocate(2) for _ in range(3)]
    with pytest.warns(ResourceWarning) as seen:
        drop(guards)
    assert len(seen) == 3
    assert manager.metrics().leaked_guards == 3


def test_a_guard_that_outlives_its_manager_keeps_the_store() -> None:
    manager = BlockManager(4)
    store = manager.store
    blocks = register(manager, chain(2))
    del manager
    gc.collect()
    blocks.release()
    store.check()


def test_guards_without_blocks_can_be_dropped_silently(manager: BlockManager) -> None:
    cache(manager, chain(1))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        manager.allocate(0)
        manager.match_prefix(chain(1, 9))
        released = manager.allocate(1)
        released.release()
        weak = manager.match_prefix(chain(1))
        weak.weak()
        weak.release()
        del released, weak
        gc.collect()
    assert seen == []
    assert manager.metrics().leaked_guards == 0


def test_a_leak_while_an_exception_is_on_its_way_does_not_replace_it(manager: BlockManager) -> None:
    def fail() -> None:
        blocks = manager.allocate(2)
        raise KeyError(len(blocks))

    def fail_and_recover() -> None:
        with pytest.raises(KeyError, match="2"):
            fail()
        gc.collect()

    with pytest.warns(ResourceWarning):
        fail_and_recover()
    assert manager.available == 8
    assert manager.metrics().leaked_guards == 1
