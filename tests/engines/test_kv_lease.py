"""The native KV manager: leases, copies of one hash side by side, vLLM's free list."""

from __future__ import annotations

import pytest

from engines.kv_building import manager as any_manager
from engines.kv_building import refused
from engines.lease_scene import BLOCK, both, cache, hashes, manager, prompt, removed, serve, stored
from understudy.errors import CapacityExhausted, WrongState
from understudy.kv.kv_manager import KvManager

# ── Copies ──


def test_equal_prompts_in_flight_take_blocks_each_and_are_one_hash() -> None:
    kv = manager()
    two = prompt(2)
    first = kv.lease()
    second = kv.lease()
    first.allocate(8)
    second.allocate(8)
    first.finalize(8, two)
    second.finalize(8, two)
    assert kv.active_blocks == 4
    raw, true = both(kv)
    assert raw == [stored(two), stored(two)]
    assert true == [stored(two)]
    first.release()
    second.release()
    assert kv.inactive_blocks == 4
    kv.check()


def test_a_hash_is_removed_with_its_last_copy() -> None:
    kv = manager(4)
    one = prompt(1)
    copies = [serve(kv, one), serve(kv, one)]
    for lease in copies:
        lease.release()
    both(kv)

    kv_filler = kv.lease()
    kv_filler.allocate(2 * BLOCK)  # the two empty blocks
    assert both(kv) == ([], [])
    more = kv.lease()
    more.allocate(BLOCK)  # the first copy, which lookups returned until now
    assert both(kv) == ([removed(*hashes(one))], [])
    assert kv.overlap(one) == (1, 0)
    last = kv.lease()
    last.allocate(BLOCK)
    assert both(kv) == ([removed(*hashes(one))], [removed(*hashes(one))])
    assert kv.overlap(one) == (0, 0)
    for lease in [kv_filler, more, last]:
        lease.release()


def test_a_copy_that_lookups_do_not_return_may_go_first() -> None:
    kv = manager(2)
    one = prompt(1)
    first, second = serve(kv, one), serve(kv, one)
    second.release()
    both(kv)
    other = kv.lease()
    other.allocate(BLOCK)
    assert both(kv) == ([removed(*hashes(one))], [])
    first.release()
    assert kv.overlap(one) == (1, 0)
    again = serve(kv, one, 1)
    assert both(kv) == ([], [])
    again.release()
    other.release()


def test_a_partly_new_run_tells_only_what_is_new() -> None:
    kv = manager()
    three = prompt(3)
    cache(kv, three[:1])
    both(kv)
    lease = serve(kv, three)  # without reuse: a second copy of the first block
    raw, true = both(kv)
    assert raw == [stored(three)]
    assert true == [stored(three[1:], hashes(three)[0])]
    lease.release()


# ── Reserve ──


def test_the_reusable_prefix_stops_at_the_first_missing_block() -> None:
    kv = manager(6)
    four = prompt(4)
    serve(kv, four[:2]).release()
    assert kv.overlap(four) == (2, 0)
    lease = kv.lease()
    lease.allocate(16, prefix=four[:2])
    assert (lease.visible_blocks, len(lease.block_ids), kv.active_blocks) == (2, 4, 4)
    assert kv.overlap(four) == (2, 2)
    lease.release()


def test_a_reused_block_is_not_counted_as_evictable() -> None:
    kv = manager(3)
    three = prompt(3)
    cache(kv, three[:2])
    holder = kv.lease()
    holder.allocate(BLOCK)
    both(kv)
    lease = kv.lease()
    refused(
        kv,
        CapacityExhausted,
        "takes 1 new blocks, but only 0 of 3",
        lambda: lease.allocate(12, prefix=three[:2]),
    )
    assert len(lease.block_ids) == 0
    assert kv.overlap(three) == (2, 0)
    holder.release()
    lease.allocate(12, prefix=three[:2])
    lease.release()


def test_a_cancelled_reservation_leaves_the_leaf_to_go_before_its_parent() -> None:
    kv = manager(3)
    three = prompt(3)
    cache(kv, three)
    lease = kv.lease()
    lease.allocate(12, prefix=three)
    lease.release()
    both(kv)
    presser = kv.lease()
    presser.allocate(BLOCK)
    presser.allocate(2 * BLOCK)
    leaf, middle = hashes(three)[2], hashes(three)[1]
    assert both(kv)[1] == [removed(leaf), removed(middle)]
    presser.release()


def test_blocks_evicted_by_one_allocation_are_one_removed_in_eviction_order() -> None:
    kv = manager(3)
    three = prompt(3)
    cache(kv, three)
    both(kv)
    lease = serve(kv, prompt(2, seed=2))
    raw, _ = both(kv)
    assert raw == [removed(*hashes(three)[:0:-1]), stored(prompt(2, seed=2))]
    lease.release()


# ── Visibility ──


def test_a_block_is_invisible_until_its_last_token_is_computed() -> None:
    kv = manager()
    three = prompt(3)
    lease = kv.lease()
    lease.allocate(12)
    assert lease.finalize(3, three) == 0
    assert kv.overlap(three) == (0, 0)
    assert lease.finalize(7, three) == 1
    assert kv.overlap(three) == (1, 1)
    assert lease.finalize(7, three) == 0
    assert lease.finalize(12, three) == 2
    raw, _ = both(kv)
    assert raw == [stored(three[:1]), stored(three[1:], hashes(three)[0])]
    lease.release()


def test_a_second_request_reuses_what_the_first_has_just_finished() -> None:
    kv = manager(3)
    two = prompt(2)
    first = serve(kv, two)
    second = kv.lease()
    second.allocate(12, prefix=two)
    assert second.block_ids.tolist()[:2] == first.block_ids.tolist()
    assert kv.active_blocks == 3
    first.release()
    second.release()


def test_a_prefix_that_was_evicted_meanwhile_is_refused() -> None:
    kv = manager(3)
    two = prompt(2)
    cache(kv, two)
    hit, _ = kv.overlap(two)
    presser = kv.lease()
    presser.allocate(2 * BLOCK)
    both(kv)
    lease = kv.lease()
    refused(kv, WrongState, "only the first 1 are resident", lambda: lease.allocate(12, prefix=two[:hit]))
    presser.release()


def test_an_aligned_prompt_served_twice_leaves_three_copies_where_kvbm_has_two_blocks() -> None:
    native = manager()
    two = prompt(2)
    cache(native, two)
    cache(native, two, reuse=1)  # the last block is computed again, for its logits
    assert native.inactive_blocks == 3
    kvbm = any_manager(8, BLOCK)
    for _ in range(2):
        kvbm.acquire(two)
        kvbm.release(list(two)[::-1])
    assert kvbm.inactive_blocks == 2


def test_a_tail_that_is_finished_with_its_parent_is_stored_behind_it() -> None:
    kv = manager()
    two = prompt(2)
    lease = kv.lease()
    lease.allocate(6)
    lease.allocate(8)
    lease.finalize(8, two)
    assert both(kv)[0] == [stored(two)]
    lease.release()


# ── Order ──


def test_a_reused_entry_leaves_the_others_in_order_and_comes_back_as_the_newest() -> None:
    kv = manager(4)
    one, two, three = (cache(kv, prompt(1, seed=seed))[0] for seed in [1, 2, 3])
    empty = ({0, 1, 2, 3} - {one, two, three}).pop()
    assert kv.eviction_order().tolist() == [empty, one, two, three]
    lease = kv.lease()
    lease.allocate(BLOCK, prefix=prompt(1, seed=2))
    assert kv.eviction_order().tolist() == [empty, one, three]
    lease.release()
    assert kv.eviction_order().tolist() == [empty, one, three, two]


# ── Let go ──


def test_a_discarded_lease_is_found_by_nobody() -> None:
    kv = manager()
    two = prompt(2)
    lease = serve(kv, two)
    kv.drain_events()
    lease.discard()
    assert (kv.active_blocks, kv.inactive_blocks) == (0, 0)
    assert kv.overlap(two) == (0, 0)
    assert both(kv)[1] == [removed(*hashes(two))]


def test_a_discard_leaves_shared_blocks_to_their_holders_and_other_copies_alone() -> None:
    kv = manager()
    two = prompt(2)
    lease = serve(kv, two)
    sharer = kv.lease()
    sharer.allocate(8, prefix=two)
    copy = serve(kv, two)
    kv.drain_events()
    lease.discard()
    raw, true = both(kv)
    assert (raw, true) == ([removed(*hashes(two))], [])
    assert kv.overlap(two) == (2, 2)
    assert (kv.active_blocks, sharer.visible_blocks) == (4, 2)
    kv.check()
    sharer.discard()  # its blocks are out of sight already
    assert both(kv) == ([], [])
    copy.discard()
    assert both(kv)[1] == [removed(*hashes(two))]
    assert (kv.active_blocks, kv.inactive_blocks) == (0, 0)
    kv.check()


def test_a_lease_that_is_dropped_gives_its_blocks_back_and_warns() -> None:
    kv = manager()
    lease = kv.lease()
    lease.allocate(8)
    with pytest.warns(ResourceWarning, match="2 blocks were dropped"):
        del lease
    assert kv.active_blocks == 0
    with kv.lease() as kept:
        kept.allocate(8)
    assert kv.active_blocks == 0


def test_the_trace_tells_of_leases_too() -> None:
    kv = KvManager(3, BLOCK, backend="native", trace=True)
    cache(kv, prompt(3))
    lease = serve(kv, prompt(2, seed=2))
    lease.release()
    assert [(r.event, r.blocks, r.active_blocks, r.inactive_blocks) for r in kv.drain_trace()] == [
        ("allocation", 3, 3, 0),
        ("allocation", 2, 2, 1),
        ("eviction", 2, 2, 1),
    ]
