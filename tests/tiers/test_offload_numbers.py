"""Copies to the host and below, with the numbers that users of KV block managers know.

Where this engine decides otherwise:
- Nothing is prepared and acknowledged: a copy ends once, at its time, so there are no tokens to confuse, and nothing
  can change in the middle. Landing twice does nothing.
- A slot cannot be released twice nor a reservation sink below zero: blocks have owners, and the checks count them.
- A block in an object store is visible when its copy has landed, as on every other tier, not before.
- A batch size shapes transfers; how many run at once is a setting of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tiers.building import BLOCK, INF, MS, Worker, chain, of_tier, shared, tiers, told, way
from understudy import _core
from understudy.errors import ConfigError, WrongState

if TYPE_CHECKING:
    from collections.abc import Sequence

G1, G2, G3, G4 = (int(tier) for tier in (_core.Tier.G1, _core.Tier.G2, _core.Tier.G3, _core.Tier.G4))


def evicting(num_gpu_blocks: int, cached: int, config: _core.TierConfig, **more: Any) -> Worker:
    """A worker whose device holds `cached` blocks of chain 1 and is asked, at 0 on its clock, for all its room."""
    worker = Worker(num_gpu_blocks, config, step_ms=0.0, **more)
    worker.cache(1, cached)
    worker.events()
    assert worker.now_ns == 0
    worker.submit(2, num_gpu_blocks * BLOCK)
    return worker


def landed_ms(worker: Worker) -> list[tuple[float, list[int]]]:
    """When which blocks arrive on the host, told by the events."""
    out = []
    worker.events()
    while (wake := worker.engine.wake_ns) is not None:
        worker.land(wake / MS)
        blocks = [block for kind, block in of_tier(worker.events(), G2) if kind == "stored"]
        if blocks:
            out.append((wake / MS, blocks))
    return out


# --- one hop ------------------------------------------------------------------------------------------


def test_an_evicted_block_holds_its_slot_until_its_copy_has_landed() -> None:
    worker = evicting(1, 1, tiers())
    assert not worker.begin()
    assert worker.events() == [("removed", G1, 1001)]
    assert worker.engine.tier_blocks(_core.Tier.G1) == (0, 0, 0, 1)
    assert worker.engine.tier_blocks(_core.Tier.G2) == (99, 1, 0, 0)
    assert worker.engine.tier_lookup(chain(1)[:1]) == [("pending", G2, MS)]
    assert worker.engine.wake_ns == MS

    worker.land(1 - 1 / MS)
    assert worker.events() == []
    assert worker.held() == 1
    assert not worker.begin(1 - 1 / MS)

    worker.land(1)
    assert worker.events() == [("stored", G2, 1001)]
    assert worker.engine.tier_blocks(_core.Tier.G1) == (1, 0, 0, 0)
    assert worker.engine.tier_lookup(chain(1)[:1]) == [("hit", G2, 0)]
    assert worker.begin(1)
    assert worker.engine.admitted == [(1, False, 0)]


def test_how_long_slots_were_held_is_exact_and_not_a_matter_of_samples() -> None:
    worker = evicting(
        3, 3, tiers(offload_batch_size=2)
    )  # 2 MB and 1 MB share 1 GB/s: the small one lands at 2 ms
    worker.play()
    totals = worker.engine.tier_totals
    assert (totals.held_max_blocks, totals.held_block_ns) == (3, 3 * 2 * MS + 2 * MS)


def test_a_held_slot_is_handed_out_to_nobody() -> None:
    worker = evicting(3, 2, tiers())
    assert not worker.begin()  # two held, one free
    assert worker.held() == 2
    worker.engine.cancel(1, 0)
    late = worker.submit(3, 2 * BLOCK)
    assert not worker.begin(0.5)  # one is not enough, and the two are not to be had
    assert worker.engine.scheduled == []
    assert (worker.held(), worker.active()) == (2, 0)
    small = worker.submit(4, BLOCK)
    assert not worker.begin(0.9)  # nobody overtakes
    worker.step(2)
    assert worker.engine.admitted == [(late, False, 0), (small, False, 0)]
    assert worker.held() == 0


def test_a_request_without_copies_of_its_own_waits_for_the_oldest() -> None:
    worker = Worker(3, tiers(offload_batch_size=1, offload_concurrency=1), step_ms=0.0)
    worker.cache(9, 3)
    first = worker.submit(1, 2 * BLOCK)
    assert not worker.begin(0)  # copies until 1 and 2
    worker.land(1)
    worker.engine.cancel(first, MS)
    second = worker.submit(2, 2 * BLOCK)
    assert not worker.begin(1)  # a third copy until 3
    worker.engine.cancel(second, MS)
    third = worker.submit(3, 2 * BLOCK)
    assert not worker.begin(1)
    assert worker.held() == 2
    worker.step(2)
    assert worker.engine.admitted == [(third, False, 0)]


def test_on_a_full_host_the_oldest_block_makes_room_for_the_next() -> None:
    worker = Worker(1, tiers(g2_blocks=1), step_ms=0.0)
    for tag in (1, 2, 3):
        worker.cache(tag, 1)
    assert of_tier(worker.events(), G2) == [("stored", 1001), ("removed", 1001), ("stored", 2001)]


def test_only_slots_whose_blocks_are_copied_are_held() -> None:
    worker = evicting(40, 5, tiers())
    assert not worker.begin()
    assert worker.engine.free_blocks == 35
    assert worker.engine.tier_blocks(_core.Tier.G1) == (35, 0, 0, 5)
    worker.land(5)
    assert worker.engine.tier_blocks(_core.Tier.G1) == (40, 0, 0, 0)
    worker.step()
    assert worker.engine.admitted == [(1, False, 0)]


def test_blocks_that_the_host_has_leave_at_once() -> None:
    worker = evicting(5, 5, tiers())
    worker.play()
    worker.cache(1, 5)  # loaded: four of them, and the last computed
    worker.events()
    copies = worker.engine.tier_totals.offloaded_blocks
    late = worker.submit(3, 5 * BLOCK)
    worker.step()
    assert worker.engine.admitted == [(late, False, 0)]
    assert worker.engine.tier_totals.offloaded_blocks == copies
    assert [kind for kind, _, _ in worker.events()][:5] == ["removed"] * 5


def test_room_without_content_is_free_to_use() -> None:
    worker = Worker(2, tiers(), step_ms=0.0)
    worker.submit(1, BLOCK - 1)
    worker.play()  # its block never filled, so nothing was registered
    worker.submit(2, 2 * BLOCK)
    worker.step()
    assert worker.engine.tier_totals.offloaded_blocks == 0


def test_a_block_that_returns_and_leaves_again_is_told_with_all_that_was_known() -> None:
    worker = Worker(2, tiers(exclusive=True), step_ms=0.0)
    worker.cache(1, 2)
    worker.cache(2, 2)
    worker.submit(1, BLOCK + 1)
    worker.play()  # block 1 is loaded, and leaves the host
    worker.events()
    worker.submit(3, 2 * BLOCK)
    worker.play()
    batch = worker.engine.take_all_events()
    again = [
        i for i, (kind, tier, block) in enumerate(told(batch)) if (kind, tier, block) == ("stored", G2, 1001)
    ]
    assert len(again) == 1
    assert batch.parent_hashes[again[0]] == 0
    assert batch.sequence_hashes[again[0]] == chain(1)[0].sequence_hash


def test_an_engine_without_tiers_has_nothing_to_look_up() -> None:
    worker = Worker(2, None)
    with pytest.raises(WrongState, match="no tiers"):
        worker.engine.tier_lookup(chain(1))
    request = worker.engine.submit("a", 3, 2, chain(1))
    with pytest.raises(WrongState, match="no tiers"):
        worker.engine.tier_waits(request)


def test_landing_twice_does_nothing() -> None:
    worker = evicting(2, 2, tiers())
    worker.begin()
    worker.land(2)
    before = of_tier(worker.events(), G2)
    worker.land(2)
    assert (len(before), worker.events()) == (2, [])


# --- how blocks share a link ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "settings", "expected"),
    [
        (1, {}, [(1.0, [1001])]),
        (2, {"offload_batch_size": 1}, [(2.0, [1001, 1002])]),
        (3, {"offload_batch_size": 2}, [(2.0, [1003]), (3.0, [1001, 1002])]),
        (
            5,
            {"offload_batch_size": 2, "offload_concurrency": 1},
            [(2.0, [1001, 1002]), (4.0, [1003, 1004]), (5.0, [1005])],
        ),
        (5, {}, [(5.0, [1001, 1002, 1003, 1004, 1005])]),
        (2, {"offload_batch_size": 1, "fixed_ns": MS // 2}, [(2.5, [1001, 1002])]),
        (2, {"gbps": 2.0}, [(1.0, [1001, 1002])]),
    ],
    ids=["one", "two transfers", "two and one", "five by two", "one transfer", "fixed cost", "faster"],
)
def test_copies_land_when_the_shared_link_has_carried_them(
    blocks: int, settings: dict[str, Any], expected: Sequence[tuple[float, list[int]]]
) -> None:
    settings = dict(settings)
    host = way(settings.pop("gbps", 1.0), down_fixed_ns=settings.pop("fixed_ns", 0))
    worker = evicting(blocks, blocks, tiers(host=host, **settings))
    assert not worker.begin()
    assert landed_ms(worker) == expected


def test_an_unlimited_link_lands_at_once_and_nobody_waits() -> None:
    worker = evicting(3, 3, tiers(gbps=INF))
    worker.step()
    assert worker.engine.admitted == [(1, False, 0)]
    assert worker.engine.wake_ns is None
    assert worker.answers(1, 3) == [("hit", G2)] * 3
    assert worker.tier_waits(1) == (0, 0)


def test_a_pending_block_is_told_with_the_time_when_it_lands_whatever_joined_its_link() -> None:
    worker = evicting(2, 2, tiers(offload_batch_size=1))
    assert not worker.begin()
    assert worker.engine.tier_lookup(chain(1)[:2]) == [("pending", G2, 2 * MS)] * 2
    worker = Worker(2, tiers(), step_ms=0.0, scheduling_policy="priority")
    worker.cache(1, 2)
    for tag, now_ms in (
        (2, 0.0),
        (3, 0.5),
    ):  # the second overtakes; each evicts a block, the end of the chain first
        worker.submit(tag, BLOCK, priority=-tag)
        assert worker.begin(now_ms) is False
    assert worker.engine.tier_lookup(chain(1)[:2]) == [("pending", G2, 2 * MS), ("pending", G2, MS + MS // 2)]
    worker.land(1.25)
    assert worker.engine.tier_lookup(chain(1)[:2])[1] == ("pending", G2, MS + MS // 2)


def test_a_copy_that_is_queued_has_no_time_yet_and_is_to_be_asked_for_again() -> None:
    worker = evicting(2, 2, tiers(offload_batch_size=1, offload_concurrency=1))
    assert not worker.begin()
    assert worker.engine.tier_lookup(chain(1)[:2]) == [("pending", G2, MS), ("retry", G2, 0)]
    worker.land(1.0)
    assert worker.engine.tier_lookup(chain(1)[:2]) == [("hit", G2, 0), ("pending", G2, 2 * MS)]


def test_a_load_that_waits_for_the_blocks_before_its_own_has_no_time_of_its_own() -> None:
    worker = Worker(64, tiers(write_through=True), step_ms=0.0)
    worker.cache(1, 9)
    for tag in range(2, 6):
        worker.cache(tag, 16)
    worker.submit(1, 8 * BLOCK + 1)
    worker.begin()
    worker.submit(1, 9 * BLOCK + 1)
    worker.begin()
    *first, last = worker.engine.tier_lookup(chain(1)[:9])
    assert {kind for kind, _, _ in first} == {"pending"}
    assert last == ("retry", G2, 0)
    worker.land(first[0][2] / MS)
    assert worker.answers(1, 9) == [("hit", 1)] * 9


def test_a_parent_is_told_before_its_child() -> None:
    worker = evicting(6, 6, tiers(offload_batch_size=4, offload_concurrency=1))
    worker.begin()
    assert landed_ms(worker) == [(4.0, [1001, 1002, 1003, 1004]), (6.0, [1005, 1006])]


def test_what_the_host_has_no_room_for_is_dropped_and_its_slots_are_free() -> None:
    worker = evicting(5, 5, tiers(g2_blocks=2))
    assert not worker.begin()
    assert worker.engine.tier_blocks(_core.Tier.G1) == (3, 0, 0, 2)
    totals = worker.engine.tier_totals
    assert (totals.offloaded_blocks, totals.dropped_blocks) == (2, 3)
    assert landed_ms(worker) == [(2.0, [1001, 1002])]  # the beginning of the chain, which can be found again


# --- the tiers of the run ------------------------------------------------------------------------------


def test_a_copy_goes_on_below_before_its_slot_on_the_device_is_free() -> None:
    config = tiers(g3=shared())
    run = _core.TierRun(config, BLOCK, True)
    worker = evicting(1, 1, config, run=run)
    worker.begin()
    worker.land(1)
    assert worker.engine.tier_blocks(_core.Tier.G1) == (1, 0, 0, 0)
    assert worker.engine.tier_blocks(_core.Tier.G2) == (99, 1, 0, 0)  # the source is pinned
    assert told(run.take_events(_core.Tier.G3)[0]) == []
    worker.land(2)
    assert told(run.take_events(_core.Tier.G3)[0]) == [("stored", G3, 1001)]
    assert worker.engine.tier_blocks(_core.Tier.G2) == (99, 0, 1, 0)


def test_the_source_of_a_copy_below_cannot_be_evicted_from_the_host() -> None:
    config = tiers(g2_blocks=1, g3=shared(worker=0.1))  # 10 ms a block
    worker = evicting(1, 1, config)
    worker.begin()
    worker.land(1)
    worker.step()  # chain 2 is on the device now
    worker.submit(3, BLOCK)
    worker.step(2)  # no room on the host, so that block is lost and nobody waits
    assert worker.engine.tier_totals.dropped_blocks == 1
    assert worker.answers(1, 1) == [("hit", G2)]
    assert worker.engine.tier_lookup(chain(2)[:1])[0][0] == "miss"


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_two_workers_share_the_tiers_own_link(tier: str) -> None:
    below: dict[str, Any] = {tier: shared(worker=INF, backend=1.0)}
    config = tiers(**below)
    run = _core.TierRun(config, BLOCK, True)
    first, second = (Worker(1, config, run=run, step_ms=0.0, name=name) for name in "ab")
    first.cache(1, 1)
    second.cache(7, 1)
    first.submit(2, BLOCK)
    second.submit(8, BLOCK)
    assert not first.begin(0)
    assert not second.begin(0)
    number = _core.Tier.G3 if tier == "g3" else _core.Tier.G4
    run.run_until(3 * MS - 1)
    assert told(run.take_events(number)[0]) == []
    run.run_until(3 * MS)
    assert [block for _, _, block in told(run.take_events(number)[0])] == [1001, 7001]


def test_a_shared_tier_of_one_block_is_not_given_to_two() -> None:
    config = tiers(g3=shared(num_blocks=1))
    run = _core.TierRun(config, BLOCK, True)
    first, second = (Worker(1, config, run=run, step_ms=0.0, name=name) for name in "ab")
    first.cache(1, 1)
    second.cache(7, 1)
    first.submit(2, BLOCK)
    second.submit(8, BLOCK)
    first.begin(0)
    second.begin(0)
    run.run_until(2 * MS)
    assert told(run.take_events(_core.Tier.G3)[0]) == [("stored", G3, 1001)]
    first.step(2)
    first.submit(3, BLOCK)
    assert not first.begin(2)  # from now on there is room below at the cost of what is there
    run.run_until(4 * MS)
    assert told(run.take_events(_core.Tier.G3)[0]) == [("removed", G3, 1001), ("stored", G3, 2001)]


def test_tiers_below_the_host_need_the_host() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        Worker(4, tiers(g2_blocks=0, g3=shared()))
