"""Blocks that are emptied, not cached, when their last reference goes."""

from __future__ import annotations

from kv.building import cache, chain, pools, register
from understudy.kv import BlockManager


def test_a_flagged_block_is_emptied_instead_of_cached() -> None:
    manager = BlockManager(4)
    with register(manager, chain(1)) as blocks:
        blocks.set_reset_on_release(True)
    assert pools(manager) == (4, 0)
    assert manager.prefix_length(chain(1)) == 0


def test_a_flagged_block_is_shared_as_long_as_it_is_held() -> None:
    manager = BlockManager(4)
    blocks = register(manager, chain(1))
    blocks.set_reset_on_release(True)
    other = manager.match_prefix(chain(1))
    blocks.release()
    assert manager.prefix_length(chain(1)) == 1
    other.release()
    assert manager.prefix_length(chain(1)) == 0


def test_the_last_writer_among_clones_decides() -> None:
    manager = BlockManager(4)
    for last, expected in ((True, (4, 0)), (False, (3, 1))):
        one = register(manager, chain(1))
        two = one.clone()
        one.set_reset_on_release(not last)
        two.set_reset_on_release(last)
        one.release()
        two.release()
        assert pools(manager) == expected


def test_the_flag_does_not_reach_the_next_tenant_of_the_slot() -> None:
    manager = BlockManager(1)
    with register(manager, chain(1, 1)) as blocks:
        blocks.set_reset_on_release(True)
    cache(manager, chain(1, 2))
    assert pools(manager) == (0, 1)


def test_a_pool_can_reset_on_release_by_default() -> None:
    manager = BlockManager(4, reset_on_release=True)
    cache(manager, chain(3))
    assert pools(manager) == (4, 0)


def test_opting_out_of_the_default_survives_being_cached_and_matched() -> None:
    manager = BlockManager(4, reset_on_release=True)
    with register(manager, chain(1)) as blocks:
        blocks.set_reset_on_release(False)
    for _ in range(3):
        assert pools(manager) == (3, 1)
        manager.match_prefix(chain(1)).release()


def test_the_flag_can_be_set_on_a_block_that_was_matched_from_the_cache() -> None:
    manager = BlockManager(4)
    cache(manager, chain(1))
    with manager.match_prefix(chain(1)) as blocks:
        blocks.set_reset_on_release(True)
    assert pools(manager) == (4, 0)


def test_blocks_of_one_registration_can_have_different_flags() -> None:
    manager = BlockManager(4)
    blocks = register(manager, chain(3))
    for i, flag in enumerate((True, False, True)):
        with manager.match_scattered(chain(3)[i : i + 1])[0] as one:
            one.set_reset_on_release(flag)
    blocks.release()
    assert manager.has_blocks(chain(3)).tolist() == [False, True, False]
    assert pools(manager) == (3, 1)


def test_an_opt_out_ends_with_the_eviction_of_its_block() -> None:
    manager = BlockManager(1, reset_on_release=True)
    with register(manager, chain(1, 1)) as blocks:
        blocks.set_reset_on_release(False)
    assert pools(manager) == (0, 1)
    cache(manager, chain(1, 2))
    assert pools(manager) == (1, 0)


def test_going_back_from_staged_to_mutable_restores_the_default() -> None:
    manager = BlockManager(1, reset_on_release=True)
    manager.allocate(1).stage(chain(1)).reset().register(chain(1)).release()
    assert pools(manager) == (1, 0)


def test_the_flag_of_a_duplicate_decides_nothing() -> None:
    for flag in (True, False):
        manager = BlockManager(4)
        primary = register(manager, chain(1))
        duplicate = register(manager, chain(1))
        duplicate.set_reset_on_release(flag)
        duplicate.release()
        assert pools(manager) == (3, 0)  # a duplicate is emptied, always
        primary.release()
        assert pools(manager) == (3, 1)  # and its primary is cached


def test_gauges_stay_coherent_with_the_flag() -> None:
    manager = BlockManager(6)
    blocks = register(manager, chain(4))
    blocks.take(2).release()
    blocks.set_reset_on_release(True)
    blocks.release()
    metrics = manager.metrics()
    assert (metrics.reset_blocks, metrics.inactive_blocks, metrics.active_blocks) == (4, 2, 0)
    assert metrics.active_references == 0
    assert manager.available == 6
    assert manager.metrics().evictions == 0
