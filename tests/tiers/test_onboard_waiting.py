"""The scheduler while loads and copies run: waits, deadlines and prefetches."""

from __future__ import annotations

from tiers.building import BLOCK, MS, Worker, chain, reader_of, shared, tiers
from tiers.onboarding import G1, G2, G3
from understudy import _core


def test_a_request_that_waits_for_a_copy_lets_the_others_go_on_and_preempts_nobody() -> None:
    worker = Worker(3, tiers())
    worker.cache(9, 1)
    blocked, other = worker.submit(1, 4, 3), worker.submit(2, 2, 8)
    worker.step()
    assert worker.engine.scheduled == [(blocked, 4), (other, 2)]
    deadline = worker.now_ns + MS
    assert worker.begin()
    assert worker.engine.scheduled == [(other, 1)]
    assert (worker.held(), worker.engine.preemptions, worker.engine.wake_ns) == (1, 0, deadline)
    worker.end()
    assert [worker.emitted(request) for request in (blocked, other)] == [1, 2]
    assert worker.now_ns == deadline
    worker.step()
    assert worker.engine.scheduled == [(blocked, 1), (other, 1)]
    assert worker.emitted(blocked) == 2
    assert worker.tier_waits(blocked) == (0, MS)


def test_two_that_grow_together_wait_for_their_own_copies() -> None:
    worker = Worker(4, tiers(offload_batch_size=1, offload_concurrency=1))
    worker.cache(9, 2)
    one, two = worker.submit(1, 4, 4), worker.submit(2, 4, 4)
    worker.step()
    start = worker.now_ns / MS
    assert not worker.begin()
    assert worker.held() == 2
    assert worker.begin(start + 1)
    assert worker.engine.scheduled == [(one, 1)]
    worker.end()
    worker.step(start + 2)
    assert worker.engine.scheduled == [(one, 1), (two, 1)]
    assert worker.engine.preemptions == 0
    assert [worker.tier_waits(request)[1] for request in (one, two)] == [MS, 2 * MS]


def test_a_sleeping_worker_wakes_at_the_deadline() -> None:
    worker = Worker(1, tiers())
    worker.cache(9, 1)
    start = worker.now_ns
    request = worker.submit(1, 4)
    worker.engine.skip_to(start)
    worker.keep(worker.engine.advance(start + MS + MS // 2))
    assert worker.engine.in_step
    assert worker.engine.now_ns == start + 2 * MS
    assert worker.engine.running == [request]


def test_a_busy_worker_moves_bytes_and_admits_at_the_end_of_its_step() -> None:
    reader, _ = reader_of([(chain(1), 1)], 8)
    start = reader.now_ns / MS
    hit, cold = reader.submit(1, 5), reader.submit(9, 4, 3)
    assert reader.begin()
    reader.duration_ns = 10 * MS
    reader.engine.land(round((start + 2) * MS))
    assert reader.answers(1, 1) == [("hit", G1)]
    assert (reader.engine.parked, reader.engine.running) == (1, [cold])
    reader.end()
    reader.step()
    assert reader.engine.admitted == [(hit, False, 4)]


def test_a_request_that_comes_while_the_worker_sleeps_is_served_at_once() -> None:
    reader, _ = reader_of([(chain(1), 1)], 8)
    start = reader.now_ns
    reader.submit(1, 5)
    reader.engine.skip_to(start)
    reader.keep(reader.engine.advance(start + MS // 4))
    assert reader.engine.asleep
    reader.engine.skip_to(start + MS // 2)
    cold = reader.submit(9, 4)
    reader.keep(reader.engine.advance(start + MS // 2 + 1))
    assert reader.emitted(cold) == 1


def test_a_prefetched_prompt_is_on_the_device_when_it_is_asked_for() -> None:
    reader, _ = reader_of([(chain(1), 2)], 8)
    start = reader.now_ns / MS
    assert reader.engine.prefetch(chain(1)[:2], reader.now_ns)
    assert reader.engine.prefetch(chain(1)[:2], reader.now_ns)  # joined
    assert reader.engine.tier_totals.onboards == 1
    assert not reader.engine.prefetch(chain(7)[:2], reader.now_ns)  # nobody has it
    reader.land(start + 4)
    request = reader.submit(1, 9)
    reader.step()
    assert reader.engine.admitted == [(request, False, 8)]
    assert reader.tier_waits(request) == (0, 0)


def test_a_prefetch_that_finds_no_room_evicts_nothing() -> None:
    worker = Worker(4, tiers())
    worker.cache(1, 2)
    worker.cache(2, 4)
    worker.play()
    before = worker.engine.tier_totals.offloaded_blocks
    assert worker.answers(1, 2)[:2] == [("hit", G2)] * 2
    assert not worker.engine.prefetch(chain(1)[:2], worker.now_ns)  # the host lacks what it would evict
    assert worker.answers(2, 4)[:4] == [("hit", G1)] * 4
    assert worker.engine.tier_totals.offloaded_blocks == before


def test_a_prefetch_that_the_host_has_no_room_to_stage_evicts_nothing() -> None:
    config = tiers(g2_blocks=2, write_through=True, g3=shared())
    worker = Worker(4, config, _core.TierRun(config, BLOCK))
    worker.cache(1, 2)
    worker.play()
    worker.cache(2, 2)
    worker.play()
    worker.cache(3, 2)
    worker.play()
    assert worker.answers(1, 2)[:2] == [("hit", G3)] * 2  # the host has what came last, and passes it on
    worker.submit(4, 2 * BLOCK)
    worker.step()
    before = worker.engine.tier_blocks(_core.Tier.G1)
    assert not worker.engine.prefetch(chain(1)[:2], worker.now_ns)
    assert worker.engine.tier_blocks(_core.Tier.G1) == before
    assert worker.answers(3, 2)[:2] == [("hit", G1)] * 2


def test_a_prefetch_evicts_what_the_host_has_already() -> None:
    worker = Worker(4, tiers(write_through=True))
    worker.cache(1, 2)
    worker.cache(2, 4)
    worker.play()
    assert worker.engine.prefetch(chain(1)[:2], worker.now_ns)
