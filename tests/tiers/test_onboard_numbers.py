"""Loads from the tiers, with the numbers that users of KV block managers know.

Where this engine decides otherwise:
- A load brings only blocks that the request can use, and one token is always computed: a prompt of 16 tokens and
  blocks of 4 loads three. Where four matter, the prompt here is one token longer.
- Blocks that several requests want are loaded once, for all of them.
- Tiers may alternate along a prompt; the run of blocks ends only where no tier has the next.
- Loaded requests return to their place in the order, not in front of older ones.
- Speculative bursts need no case of their own: a request asks for the room of its step, whatever that is.
- A load that fails is computed instead; nothing panics.
- A cancelled request's number is never given again, so that an old load cannot complete a new request.
"""

from __future__ import annotations

import pytest

from tiers.building import BLOCK, MS, Only, Worker, chain, forked, of_tier, reader_of, tiers, way
from tiers.onboarding import G1, G2, G3, G4, after, on_host, shared_tier
from understudy import _core

# --- from the host ------------------------------------------------------------------------------------


def test_a_request_whose_prompt_is_on_the_host_parks_until_it_is_loaded() -> None:
    worker = on_host(4, bytes_per_block=250_000)
    start = worker.now_ns / MS
    request = worker.submit(1, 17)
    assert not worker.begin()
    assert (worker.engine.parked, worker.engine.num_waiting, worker.engine.admitted) == (1, 0, [])
    assert worker.engine.wake_ns == (start + 1) * MS
    assert not worker.begin(start + 0.5)
    assert worker.engine.parked == 1
    worker.step(start + 2)
    assert worker.engine.admitted == [(request, False, 16)]
    assert worker.below_tokens(request) == (16, 0, 0)
    assert worker.tier_waits(request) == (MS, 0)  # of the load, not until somebody looked


def test_a_load_is_not_admitted_a_nanosecond_early() -> None:
    worker = on_host(1)
    start = worker.now_ns
    request = worker.submit(1, 5)
    assert not worker.begin()
    assert not worker.begin((start + MS - 1) / MS)
    worker.step((start + MS) / MS)
    assert worker.engine.admitted == [(request, False, 4)]


def test_two_loads_share_the_link_up() -> None:
    worker = on_host(1)
    other = forked(3, 0, 3)
    worker.cache(other, 2)
    worker.cache(2, 8)
    start = worker.now_ns / MS
    worker.submit(1, 5)
    worker.submit(other, 9)
    assert not worker.begin()
    assert worker.engine.wake_ns is not None
    worker.step(start + 2)  # half of the link each, until the shorter is done
    assert [cached for _, _, cached in worker.engine.admitted] == [4]
    worker.step(start + 3)
    assert [cached for _, _, cached in worker.engine.admitted] == [8]


def test_loaded_blocks_are_told_on_the_device_and_stay_on_the_host() -> None:
    worker = on_host(2)
    worker.submit(1, 9)
    worker.begin()
    worker.events()
    worker.land(after(worker, 2))
    assert worker.events() == [("stored", G1, 1001), ("stored", G1, 1002)]
    assert worker.answers(1, 2) == [("hit", G1)] * 2
    worker.play()
    worker.cache(3, 8)
    assert worker.answers(1, 2) == [("hit", G2)] * 2


def test_an_exclusive_host_gives_its_block_away() -> None:
    worker = Worker(2, tiers(exclusive=True), step_ms=0.0)
    worker.cache(1, 2)
    worker.cache(2, 2)
    worker.events()
    worker.submit(1, 5)
    worker.play()
    assert ("removed", 1001) in of_tier(worker.events(), G2)


def test_the_cold_wait_while_a_parked_request_has_the_room() -> None:
    reader, _ = reader_of([(chain(1), 1)], 2)
    hit = reader.submit(1, 5)
    cold = reader.submit(9, 8)
    start = reader.now_ns / MS
    assert not reader.begin()
    assert (reader.engine.parked, reader.active()) == (1, 1)
    assert not reader.begin(start + 1)
    assert reader.engine.waiting_head() == [cold]
    reader.step(start + 2)
    assert reader.engine.admitted == [(hit, False, 4)]


def test_others_overtake_a_parked_request_but_it_returns_to_its_place() -> None:
    reader, _ = reader_of([(chain(1), 1)], 8)
    start = reader.now_ns / MS
    hit = reader.submit(1, 5)
    cold = reader.submit(9, 8, 3)
    reader.step()
    assert reader.engine.admitted == [(cold, False, 0)]
    late = reader.submit(8, 8)
    reader.land(start + 2)
    reader.step(start + 2)
    assert [request for request, _, _ in reader.engine.admitted] == [hit, late]


def test_two_that_are_loaded_together_keep_their_order() -> None:
    reader, _ = reader_of([(chain(1), 1), (chain(2), 1)], 8)
    start = reader.now_ns / MS
    one, two = reader.submit(2, 5), reader.submit(1, 5)
    assert not reader.begin()
    late = reader.submit(8, 4)
    reader.step(start + 9)
    assert [request for request, _, _ in reader.engine.admitted] == [one, two, late]


def test_what_is_on_the_device_stays_there_while_the_rest_is_loaded() -> None:
    reader, _ = reader_of([(chain(1), 3)], 4)
    reader.submit(1, 5)
    reader.play()  # block 1 is on the device
    start = reader.now_ns / MS
    request = reader.submit(1, 13)
    assert not reader.begin()
    assert reader.engine.tier_blocks(_core.Tier.G1) == (1, 3, 0, 0)  # a hit and two reserved
    greedy = reader.submit(9, 8)
    assert not reader.begin(start + 1)  # one is free, and the hit is not to be evicted
    reader.step(start + 4)
    assert reader.engine.admitted == [(request, False, 12)]
    assert reader.below_tokens(request) == (0, 8, 0)
    assert greedy in reader.engine.waiting_head()


def test_requests_that_want_the_same_blocks_share_one_load() -> None:
    worker = on_host(4, num_gpu_blocks=16, bytes_per_block=250_000, host=way(4.0))
    start = worker.now_ns / MS
    requests = [worker.submit(forked(1, 4, fork), 20) for fork in range(4)]
    assert not worker.begin()
    totals = worker.engine.tier_totals
    assert (totals.onboards, totals.onboarded_blocks, totals.joined_loads) == (1, 4, 12)
    worker.step(start + 0.25)
    assert worker.engine.admitted == [(request, False, 16) for request in requests]
    for request in requests:
        assert worker.tier_waits(request) == (MS // 4, 0)


def test_a_longer_load_waits_for_the_shorter_one_that_it_joined() -> None:
    reader, _ = reader_of([(chain(1), 4)], 16)
    start = reader.now_ns / MS
    short, long = reader.submit(1, 9), reader.submit(1, 17)
    assert not reader.begin()  # two blocks each to be staged, side by side
    assert reader.engine.tier_totals.onboarded_blocks == 4
    reader.play()
    assert [reader.below_tokens(request)[1] for request in (short, long)] == [8, 16]
    assert reader.now_ns / MS == start + 8  # 4 MB on each of two hops


# --- from below ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_a_block_below_is_staged_on_the_host(tier: str) -> None:
    reader, _ = reader_of([(chain(1), 1)], 4, tier)
    number = G3 if tier == "g3" else G4
    start = reader.now_ns / MS
    request = reader.submit(1, 5)
    assert not reader.begin()
    assert reader.answers(1, 1) == [("retry", number)]  # two hops: the second has not begun
    reader.land(start + 1 - 1 / MS)
    assert reader.events() == []
    reader.land(start + 1)
    assert reader.answers(1, 1) == [("pending", number)]
    assert reader.events() == [("stored", G2, 1001)]
    reader.land(start + 2 - 1 / MS)
    assert reader.events() == []
    reader.land(start + 2)
    assert reader.events() == [("stored", G1, 1001)]
    reader.step()
    assert reader.engine.admitted == [(request, False, 4)]
    assert reader.below_tokens(request) == ((0, 4, 0) if tier == "g3" else (0, 0, 4))


def test_two_blocks_below_take_two_and_two() -> None:
    reader, _ = reader_of([(chain(1), 2)], 4)
    start = reader.now_ns / MS
    request = reader.submit(1, 9)
    assert not reader.begin()
    reader.land(start + 2)
    assert [on for _, on, _ in reader.events()] == [G2, G2]
    assert not reader.begin(start + 4 - 1 / MS)
    reader.step(start + 4)
    assert reader.engine.admitted == [(request, False, 8)]


def test_the_run_of_blocks_ends_at_the_first_that_no_tier_has() -> None:
    whole = chain(1)
    below = {"g3": shared_tier()}
    keeper = tiers(write_through=True, offload_filter=Only(whole[1:3], whole[4:5]), **below)  # type: ignore[arg-type]
    run = _core.TierRun(keeper, BLOCK)
    writer = Worker(16, keeper, run=run, step_ms=0.0, name="writer")
    writer.cache(1, 5)
    first = tiers(write_through=True, offload_filter=Only(whole[:1]), **below)  # type: ignore[arg-type]
    reader = Worker(6, first, run=run, step_ms=0.0, name="reader")
    reader.now_ns = writer.now_ns
    reader.submit(1, 5)
    reader.play()
    reader.cache(9, 6)  # and off the device
    assert reader.answers(1) == [("hit", G2), ("hit", G3), ("hit", G3), ("miss", reader.answers(1)[3][1])]
    request = reader.submit(1, 22)
    start = reader.now_ns / MS
    assert not reader.begin()
    assert reader.engine.tier_totals.onboarded_blocks == 3
    reader.step(start + 5)  # two staged, three loaded
    assert reader.engine.admitted == [(request, False, 12)]
    assert reader.below_tokens(request) == (4, 8, 0)


def test_without_room_to_stage_what_the_host_has_must_do() -> None:
    reader, _ = reader_of([(chain(1), 3)], 4, g2_blocks=1)
    reader.submit(1, 5)
    reader.play()
    reader.cache(9, 4)
    assert reader.answers(1, 2) == [("hit", G2), ("hit", G3)]
    request = reader.submit(1, 13)
    start = reader.now_ns / MS
    assert not reader.begin()
    reader.step(start + 1)
    assert reader.engine.admitted == [(request, False, 4)]


def test_without_any_room_to_stage_it_is_computed() -> None:
    reader, _ = reader_of([(chain(1), 3)], 8, g2_blocks=2)
    request = reader.submit(1, 13)  # three to stage on two
    reader.step()
    assert reader.engine.admitted == [(request, False, 0)]
