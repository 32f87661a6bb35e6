"""What a kvbm KV manager says about its blocks, and what it tells of a request before and after it runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

from engines.kv_building import (
    admit,
    grow,
    manager,
    named,
    numbered,
    pools,
    raw,
    refused,
    removed,
    root,
    roots,
    send,
    stored,
    tree,
)
from model.kv_manager import told
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.kv.kv_manager import KvManager, PrefillCost
from understudy.kv.sequence import ActiveSequence
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy.events import Stored


# ── Events ──


def test_a_stored_suffix_is_anchored_at_the_last_reused_block() -> None:
    kv = manager(8)
    kv.acquire(tree(10, 11))
    kv.release(tree(11, 10))
    kv.drain_events()
    kv.acquire(tree(10, 11, 12))
    assert raw(kv) == [stored(12, parent=11)]


def test_unrelated_blocks_are_one_raw_event_and_several_true_ones() -> None:
    kv = manager(8)
    kv.acquire([root(0)])
    kv.drain_events()
    kv.acquire(roots(0, 1, 2))
    events = kv.drain_events()
    assert numbered(told(events.raw)) == [stored(1, 2, parent=0)]
    assert numbered(told(events.consolidated)) == [stored(1), stored(2)]


def test_shared_prefixes_count_once_and_are_referenced_by_each() -> None:
    kv = manager(8)
    kv.acquire(tree(0, 1, 2))
    kv.acquire(tree(0, 1, 5))
    assert pools(kv) == (4, 0, 6)


def test_one_new_block_in_a_full_cache_is_one_stored_and_one_removed() -> None:
    kv = manager(2)
    kv.acquire(roots(10, 11))
    kv.release(roots(10, 11))
    kv.drain_events()
    kv.acquire(roots(12))
    assert raw(kv) == [stored(12), removed(10)]


def test_ids_count_by_one_over_drains_and_rows_carry_what_was_told() -> None:
    kv = manager(2, dp_rank=3)
    kv.acquire(tree(0, 1))
    first = kv.drain_events()
    kv.release(tree(1, 0))
    kv.acquire(tree(10))
    second = kv.drain_events()
    assert [event.event_id for event in [*first.raw, *second.raw]] == [0, 1, 2]  # type: ignore[union-attr]
    assert [event.event_id for event in [*first.consolidated, *second.consolidated]] == [0, 1, 2]  # type: ignore[union-attr]
    event = cast("Stored", first.raw[0])
    assert [(b.sequence_hash, b.local_hash, b.position, b.generation) for b in event.blocks] == [
        (named(0), 10 * named(0), 0, 1),
        (named(1), 10 * named(1), 1, 2),
    ]
    assert event.dp_rank == 3
    assert first.raw[0] is first.raw[0]


def test_token_ids_travel_with_the_blocks_that_are_stored() -> None:
    kv = manager(8, 2, event_token_ids=True)
    kv.acquire(tree(0), token_ids=[1, 2])
    kv.acquire([*tree(0, 1), 4, *tree(2)], token_ids=[1, 2, 3, 4, 5, 6])
    kv.seal(4, tree(3)[0], token_ids=[7, 8])
    events = cast("list[Stored]", kv.drain_events().raw)
    assert [[block.token_ids for block in event.blocks] for event in events] == [
        [(1, 2)],
        [(3, 4), (5, 6)],
        [(7, 8)],
    ]


def test_token_ids_of_the_wrong_length_are_refused_before_anything_changes() -> None:
    kv = manager(8, 4, event_token_ids=True)
    kv.acquire([1])
    ids = [1, 2, 3, 4]
    refused(kv, InvalidArgument, "8 tokens for 2 full blocks", lambda: kv.acquire(tree(0, 1), token_ids=ids))
    refused(kv, InvalidArgument, "token_ids", lambda: kv.acquire(tree(0)))
    refused(kv, InvalidArgument, "4 tokens for 1", lambda: kv.seal(1, tree(0)[0], token_ids=ids[:3]))
    plain = manager(8, 4)
    refused(plain, InvalidArgument, "token_ids", lambda: plain.acquire(tree(0, 1), token_ids=ids))


def test_without_events_nothing_is_kept() -> None:
    kv = KvManager(4, 16)
    kv.acquire(tree(0))
    assert kv.drain_events().raw == []


# ── With sequences ──


def sequence(tokens: int, max_output: int = 100, block_size: int = 16, **settings: Any) -> ActiveSequence:
    return ActiveSequence(range(tokens), max_output, block_size=block_size, rng=random.Random(1), **settings)


def test_a_chunked_prompt_is_stored_in_chunks_each_behind_the_one_before() -> None:
    kv = manager(256, 64)
    prompt = sequence(512, block_size=64)
    admit(kv, prompt, 256)
    admit(kv, prompt, 512)
    hashes = prompt.identities.sequence_hashes.tolist()
    assert told(kv.drain_events().raw) == [("stored", None, hashes[:4]), ("stored", hashes[3], hashes[4:])]


def test_a_request_preempted_twice_releases_only_what_it_took_again() -> None:
    kv = manager(16, 4)
    request = sequence(6, 16, 4)
    admit(kv, request)
    assert kv.active_blocks == 2
    for _ in range(3):
        grow(kv, request)
    assert kv.active_blocks == 3
    send(kv, request.preempt())
    assert kv.active_blocks == 0
    admit(kv, request, request.prompt_tokens)
    assert kv.active_blocks == 2
    send(kv, request.preempt())
    assert kv.active_blocks == 0
    kv.check()


def test_without_prefix_caching_a_preempted_request_finds_its_own_blocks_and_nobody_elses() -> None:
    kv = manager(8, 16)
    request = sequence(64, enable_prefix_caching=False)
    admit(kv, request)
    assert pools(kv) == (4, 0, 4)
    send(kv, request.preempt())
    assert pools(kv) == (0, 4, 0)
    admit(kv, request)
    assert pools(kv) == (4, 0, 4)
    assert [kind for kind, _, _ in told(kv.drain_events().raw)] == ["stored"]
    twin = ActiveSequence(range(64), 1, block_size=16, enable_prefix_caching=False, rng=random.Random(2))
    assert kv.probe_new_blocks(twin.blocks) == 4


def test_prefill_cost_of_an_unknown_prompt_is_all_of_it() -> None:
    assert manager().prefill_cost(sequence(35)) == PrefillCost(0, 0, 0, 0, 35, 3)


def test_prefill_cost_tells_active_from_inactive_blocks() -> None:
    kv = manager(8, 16)
    known = TokenBlocks(range(48), 16).identities
    kv.acquire(known)
    kv.release([known[2]])
    assert kv.prefill_cost(sequence(40)) == PrefillCost(2, 2, 32, 32, 8, 1)
    assert kv.prefill_cost(sequence(48)) == PrefillCost(3, 2, 48, 32, 0, 0)
    assert kv.prefill_cost(sequence(70)) == PrefillCost(3, 2, 48, 32, 22, 2)
    assert kv.overlap(known[1:]) == (2, 1)


def test_prefill_cost_stops_at_the_first_missing_block() -> None:
    kv = manager(8, 16)
    known = TokenBlocks(range(48), 16).identities
    kv.acquire(known)
    kv.discard([known[1]])
    assert kv.prefill_cost(sequence(48)) == PrefillCost(1, 1, 16, 16, 32, 2)


def test_prefill_cost_of_a_preempted_request_counts_its_generated_blocks() -> None:
    kv = manager(16, 4)
    request = sequence(6, 16, 4)
    admit(kv, request)
    for _ in range(3):
        grow(kv, request)
    send(kv, request.preempt())
    assert kv.prefill_cost(request) == PrefillCost(2, 0, 8, 0, 1, 1)


def test_prefill_cost_without_prefix_caching_is_all_of_it() -> None:
    off = manager(8, 16, enable_prefix_caching=False)
    off.acquire(TokenBlocks(range(32), 16).identities)
    assert off.prefill_cost(sequence(32)) == PrefillCost(0, 0, 0, 0, 32, 2)
    kv = manager(8, 16)
    request = sequence(32, enable_prefix_caching=False)
    admit(kv, request)
    assert kv.prefill_cost(request) == PrefillCost(0, 0, 0, 0, 32, 2)


def test_a_reservation_that_fails_leaves_the_cache_alone() -> None:
    kv = manager(3, 4)
    kv.acquire(tree(0, 1))
    kv.release(tree(1))
    kv.drain_events()
    refused(kv, CapacityExhausted, "are available", lambda: kv.acquire([1, 2, 3]))
    assert kv.is_resident(tree(1)[0])


def test_probe_counts_what_is_neither_active_nor_inactive() -> None:
    kv = manager()
    kv.acquire([*tree(0, 1), 5])
    kv.release(tree(1))
    assert kv.probe_new_blocks([*tree(0, 1, 2), 5, 6]) == 2


# ── Trace log ──


def test_the_trace_tells_allocations_and_evictions_with_the_pool_after_the_call() -> None:
    kv = KvManager(4, 16, trace=True, dp_rank=2)
    kv.acquire([*tree(0, 1), 3])
    kv.release(tree(1))
    kv.acquire(tree(10, 11))
    kv.acquire(tree(10))  # takes nothing
    records = kv.drain_trace()
    assert [(r.event, r.blocks, r.free_blocks, r.active_blocks, r.inactive_blocks) for r in records] == [
        ("allocation", 3, 1, 3, 0),
        ("allocation", 2, 0, 4, 0),
        ("eviction", 1, 0, 4, 0),
    ]
    assert (records[0].block_size, records[0].total_blocks, records[0].dp_rank) == (16, 4, 2)
    assert records[0].utilization == 0.75
    assert kv.drain_trace() == []
    quiet = KvManager(4, 16)
    quiet.acquire(tree(0))
    assert quiet.drain_trace() == []
