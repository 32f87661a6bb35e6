"""Leases of the native KV manager: calls that it refuses, and settings without a cache."""

from __future__ import annotations

import pytest

from engines.kv_building import refused
from engines.lease_scene import both, cache, manager, prompt, serve
from understudy.errors import InvalidArgument, WrongState
from understudy.kv.kv_manager import KvManager


def test_only_the_first_allocation_may_reuse_a_prefix() -> None:
    kv = manager()
    two = prompt(2)
    cache(kv, two)
    both(kv)
    lease = kv.lease()
    lease.allocate(4, prefix=two[:1])
    refused(kv, WrongState, "only the first allocation", lambda: lease.allocate(8, prefix=two))
    lease.release()
    lease.allocate(8, prefix=two)  # it starts over
    lease.release()


def test_arguments_that_do_not_fit_are_refused() -> None:
    kv = manager()
    two = prompt(2)
    lease = kv.lease()
    lease.allocate(8)
    refused(kv, InvalidArgument, "at least the 8", lambda: lease.allocate(7))
    refused(kv, InvalidArgument, "at most the 8", lambda: lease.finalize(9, two))
    refused(kv, InvalidArgument, "name the 2 complete blocks", lambda: lease.finalize(8, two[:1]))
    refused(
        kv, InvalidArgument, r"identities\[0\] is the block at position 1", lambda: lease.finalize(4, two[1:])
    )
    lease.finalize(8, two)
    kv.drain_events()
    other = kv.lease()
    refused(kv, InvalidArgument, "more than the 1", lambda: other.allocate(4, prefix=two))
    refused(
        kv,
        InvalidArgument,
        r"prefix\[0\] is the block at position 1",
        lambda: other.allocate(8, prefix=two[1:]),
    )
    lease.release()


def test_token_ids_are_those_of_the_blocks_that_become_visible() -> None:
    kv = manager(event_token_ids=True)
    two = prompt(2)
    lease = kv.lease()
    lease.allocate(8)
    refused(kv, InvalidArgument, "4 tokens for 1", lambda: lease.finalize(4, two))
    lease.finalize(4, two, token_ids=[1, 2, 3, 4])
    lease.finalize(8, two, token_ids=[5, 6, 7, 8])
    ids = [block.token_ids for event in kv.drain_events().raw for block in event.blocks]  # type: ignore[union-attr]
    assert ids == [(1, 2, 3, 4), (5, 6, 7, 8)]
    lease.release()


def test_verbs_belong_to_kvbm_and_leases_to_native() -> None:
    kv = manager()
    block = prompt(1)
    for call in [
        lambda: kv.acquire(block),
        lambda: kv.release(block),
        lambda: kv.discard(block),
        lambda: kv.seal(1, block[0]),
    ]:
        refused(kv, WrongState, "needs backend='kvbm'", call)
    with pytest.raises(WrongState, match="backend='native'"):
        KvManager(4, 4).lease()


def test_without_prefix_caching_nothing_is_cached_or_said() -> None:
    kv = manager(enable_prefix_caching=False)
    two = prompt(2)
    lease = serve(kv, two)
    assert lease.visible_blocks == 0
    assert kv.overlap(two) == (0, 0)
    other = kv.lease()
    refused(kv, InvalidArgument, "prefix caching is off", lambda: other.allocate(8, prefix=two))
    lease.release()
    assert (kv.active_blocks, kv.inactive_blocks) == (0, 0)
    assert both(kv) == ([], [])
