"""Several KV groups with tiers, rule by rule: a window of 64 tokens, full attention, blocks of 16 tokens and 1 MB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from model.grouped_device import Group
from tiers.building import MS
from tiers.group_building import FULL, WINDOW, GroupWorker, below, chain, kv_group
from understudy import _core
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUPS = [WINDOW, FULL]
WINDOW_BLOCKS = 4


def position_of(lineage: int) -> int:
    """Unit of hashing at whose end the block ends, times the groups, plus its group."""
    bits = (54, 46, 38)[lineage >> 126]
    return lineage >> (64 + bits) & (1 << 24) - 1


class Drop:
    """An offload policy without the blocks of one group that end behind some tokens."""

    def __init__(self, group: int, behind: int) -> None:
        self.drops: Callable[[int], bool] = lambda position: (
            position % len(GROUPS) == group and (position // len(GROUPS) + 1) * 16 > behind
        )

    def select(self, lineages: Sequence[int], _reuse: object) -> list[bool]:
        return [not self.drops(position_of(lineage)) for lineage in lineages]


def push_out(worker: GroupWorker, tag: int = 900) -> None:
    """Fill the device with blocks that no other request uses."""
    worker.run(chain(tag, 64), 60 * 16)
    worker.run(chain(tag + 1, 64), 60 * 16)


def worker(config: _core.TierConfig | None = None, **settings: Any) -> GroupWorker:
    return GroupWorker(GROUPS, 130, below(1000) if config is None else config, **settings)


def test_a_load_brings_the_tail_of_a_window_and_the_whole_prefix_of_full_attention() -> None:
    one = worker()
    one.run(chain(1, 64), 257)
    push_out(one)
    before = one.engine.tier_totals.onboarded_blocks
    record = one.run(chain(1, 64), 257)
    assert record.cached_first == 256
    assert one.engine.tier_totals.onboarded_blocks - before == 16 + WINDOW_BLOCKS
    assert record.parked_ns == (16 + WINDOW_BLOCKS) * MS
    assert list(record.below_total) == [256, 0, 0]


def test_only_the_blocks_that_the_device_lacks_are_loaded() -> None:
    one = worker()
    one.run(chain(1, 64), 257, outputs=70)  # its window leaves the tail, which is then evicted first
    one.run(chain(2, 64), 55 * 16)  # takes the 106 empty blocks and four more
    record = one.run(chain(1, 64), 257)
    assert record.cached_first == 256
    assert one.engine.tier_totals.onboarded_blocks == WINDOW_BLOCKS
    assert list(record.below_total) == [64, 0, 0]


@pytest.mark.parametrize("group", [0, 1])
def test_a_hit_ends_where_every_group_has_its_tail(group: int) -> None:
    one = worker(below(1000, offload_filter=Drop(group, 128)))
    for prompt in (129, 257):
        one.run(chain(1, 64), prompt)
    push_out(one)
    assert one.run(chain(1, 64), 257).cached_first == 128


def test_a_window_without_its_tail_on_any_tier_hits_nothing() -> None:
    one = worker(below(1000, offload_filter=Drop(0, 0)))
    one.run(chain(1, 64), 257)
    push_out(one)
    record = one.run(chain(1, 64), 257)
    assert (record.cached_first, record.parked_ns) == (0, 0)


def test_a_hit_from_the_host_is_scheduled_as_one_from_the_device_after_its_load() -> None:
    small, large = worker(), GroupWorker(GROUPS, 1000, None)
    for one in (small, large):
        one.run(chain(1, 64), 257)
        push_out(one)
        one.run(chain(1, 64), 300, outputs=20)
    loaded, found = (one.records[max(one.records)] for one in (small, large))
    assert loaded.cached_first == found.cached_first == 256
    assert loaded.parked_ns == 20 * MS
    assert found.parked_ns == 0
    for record in (loaded, found):
        assert record.first_token_ns - record.first_admit_ns == 1 * MS
        assert record.finish_ns - record.first_token_ns == 19 * MS
    assert loaded.first_admit_ns - loaded.queued_ns == 20 * MS + found.first_admit_ns - found.queued_ns


def test_evicted_blocks_of_all_groups_are_copied_before_their_slots_are_used() -> None:
    one = worker(below(1000, write_through=False))
    one.run(chain(1, 64), 257)
    assert one.engine.tier_totals.offloaded_blocks == 0
    push_out(one)
    assert one.run(chain(1, 64), 257).cached_first == 256
    slow = worker(below(1000, write_through=False, host=_core.LinkPairConfig(down_gbps=1.0, up_gbps=1.0)))
    slow.run(chain(1, 64), 257)
    push_out(slow)
    assert slow.engine.tier_totals.room_waits > 0
    assert slow.run(chain(1, 64), 257).cached_first == 256


def test_blocks_come_back_from_the_disk_through_the_host() -> None:
    one = worker(below(60, 1000))
    one.run(chain(1, 64), 257)
    push_out(one)
    record = one.run(chain(1, 64), 257)
    assert record.cached_first == 256
    assert list(record.below_total) == [0, 256, 0]
    assert record.parked_ns == 2 * 20 * MS


def test_a_hit_without_the_disk_is_taken_where_the_host_cannot_stage() -> None:
    """The host has room for 12 blocks, of which a load of 20 blocks from the disk needs more."""
    one = worker(below(12, 1000))
    one.run(chain(1, 64), 257)
    push_out(one)
    assert one.run(chain(1, 64), 257).cached_first == 0


def test_a_load_that_takes_longer_than_computing_is_not_started() -> None:
    one = worker(below(1000, recompute_fallback=True))  # steps compute a prompt in no time
    one.run(chain(1, 64), 257)
    push_out(one)
    record = one.run(chain(1, 64), 257)
    assert (record.cached_first, record.parked_ns) == (0, 0)
    assert one.engine.tier_totals.slow_loads == 1


def test_requests_that_need_the_same_blocks_share_one_load() -> None:
    one = worker()
    one.run(chain(1, 64), 257)
    push_out(one)
    before = one.engine.tier_totals.onboarded_blocks
    numbers = [one.submit(chain(1, 64), 257), one.submit(chain(1, 64), 259)]
    one.play()
    assert [one.records[number].cached_first for number in numbers] == [256, 256]
    assert one.engine.tier_totals.onboarded_blocks - before == 20
    assert one.engine.tier_totals.joined_loads == 20


def test_a_cancelled_request_leaves_no_block_referenced() -> None:
    one = worker()
    one.run(chain(1, 64), 257)
    push_out(one)
    number = one.submit(chain(1, 64), 257)
    one.engine.begin_step(one.now_ns)
    assert one.engine.parked == 1
    one.engine.cancel(number, one.now_ns)
    one.play()
    assert one.engine.tier_blocks(_core.Tier.G1)[1] == 0


def ask(one: GroupWorker, units: int) -> list[tuple[str, int]]:
    """Look up a conversation; returns kind and tier of each unit up to the first miss."""
    return [(kind, tier) for kind, tier, _ in one.engine.tier_lookup(chain(1, units))]


def test_a_lookup_answers_for_the_longest_hit_of_all_groups() -> None:
    one = worker()
    assert ask(one, 8) == [("miss", 1)]
    one.run(chain(1, 64), 257, outputs=70)
    assert ask(one, 16) == [("hit", 1)] * 16
    one.run(chain(2, 64), 55 * 16)  # evicts the tail of the window
    assert ask(one, 17) == [("hit", 1)] * 12 + [("hit", 2)] * WINDOW_BLOCKS + [("miss", 1)]
    push_out(one)
    assert ask(one, 16) == [("hit", 2)] * 16
    assert ask(one, 15) == [("miss", 1)]  # the window's tail is kept at the end of the prompt only


def test_a_prefetch_brings_the_longest_hit_of_all_groups() -> None:
    one = worker()
    one.run(chain(1, 64), 257)
    push_out(one)
    assert not one.engine.prefetch(chain(7, 16), one.now_ns)
    assert one.engine.prefetch(chain(1, 16), one.now_ns)
    assert ask(one, 16)[-1][0] == "pending"
    one.play()
    assert ask(one, 16) == [("hit", 1)] * 16
    assert not one.engine.prefetch(chain(1, 16), one.now_ns)
    record = one.run(chain(1, 64), 257)
    assert (record.cached_first, record.parked_ns) == (256, 0)


def test_a_prefetch_evicts_no_block_that_the_host_lacks() -> None:
    one = worker(below(1000, write_through=False))
    one.run(chain(1, 64), 961)
    push_out(one)
    assert not one.engine.prefetch(chain(1, 60), one.now_ns)
    one.engine.forget_cache(one.now_ns)
    assert one.engine.prefetch(chain(1, 60), one.now_ns)


def test_a_prefetch_that_the_host_cannot_stage_brings_nothing() -> None:
    one = worker(below(17, 1000))
    one.run(chain(1, 64), 257)
    push_out(one)
    assert not one.engine.prefetch(chain(1, 16), one.now_ns)
    one.engine.check()


def test_a_prefetch_under_vllms_offload_is_refused_by_name() -> None:
    base = _core.VllmEngineConfig(num_gpu_blocks=64, offload=_core.VllmOffload(host_chunks=10))
    config = _core.with_groups(base, [kv_group(group) for group in GROUPS])
    engine = _core.VllmEngine(config, _core.constant_timing(0.0, 1.0), tiers=below(10))
    for call in (lambda: engine.prefetch(chain(1, 8), 0), lambda: engine.tier_lookup(chain(1, 8))):
        with pytest.raises(UnderstudyError, match="vLLM's offload has no such call"):
            call()


def test_groups_of_other_block_sizes_have_names_of_their_own() -> None:
    one = GroupWorker([Group(16, window=64), Group(32)], 92, below(1000))
    one.run(chain(1, 64), 257)
    push_out(one)
    before = one.engine.tier_totals.onboarded_blocks
    assert one.run(chain(1, 64), 257).cached_first == 256
    assert one.engine.tier_totals.onboarded_blocks - before == 8 + WINDOW_BLOCKS
