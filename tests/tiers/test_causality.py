"""Tiers of the run: what one worker stores, another sees when it is there and not a nanosecond before."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tiers.building import BLOCK, INF, MS, Worker, chain, of_tier, reader_of, shared, tiers, told
from tiers.fleets import crowd_of, digest, drained, per_request, play
from understudy import _core
from understudy.router import Router

if TYPE_CHECKING:
    from understudy.router import FleetView, RouteRequest
    from understudy.workload import Workload

G2, G3, G4 = (int(tier) for tier in (_core.Tier.G2, _core.Tier.G3, _core.Tier.G4))


def two_workers(tier: str = "g3") -> tuple[_core.TierRun, Worker, Worker]:
    """A is about to copy a block down, where it lands 2 ms after it was evicted."""
    below: dict[str, Any] = {tier: shared()}
    config = tiers(**below)
    run = _core.TierRun(config, BLOCK, True)
    a, b = (Worker(1 if name == "a" else 8, config, run=run, step_ms=0.0, name=name) for name in "ab")
    a.cache(1, 1)
    a.submit(2, BLOCK)
    return run, a, b


@pytest.mark.parametrize("tier", ["g3", "g4"])
def test_a_copy_is_pending_for_the_others_until_it_lands_and_then_a_hit(tier: str) -> None:
    run, a, b = two_workers(tier)
    number = G3 if tier == "g3" else G4
    assert b.answers(1, 1)[0][0] == "miss"
    assert not a.begin()
    assert a.answers(1, 1) == [("pending", G2)]
    assert b.answers(1, 1)[0][0] == "miss"  # the host is A's own
    run.run_until(MS)
    assert a.answers(1, 1) == [("hit", G2)]
    assert b.engine.tier_lookup(chain(1)[:1]) == [("pending", number, 2 * MS)]
    run.run_until(2 * MS - 1)
    assert b.engine.tier_lookup(chain(1)[:1]) == [("pending", number, 2 * MS)]
    run.run_until(2 * MS)
    assert b.engine.tier_lookup(chain(1)[:1]) == [("hit", number, 0)]


def test_a_request_waits_for_a_copy_that_is_on_its_way() -> None:
    run, a, b = two_workers()
    assert not a.begin()
    run.run_until(MS + MS // 2)
    request = b.submit(1, BLOCK + 1)
    assert not b.begin(1.5)
    assert b.engine.parked == 1
    for due_ms, told_of in ((2, []), (3, [("stored", G2, 1001)]), (4, [("stored", 1, 1001)])):
        run.run_until(due_ms * MS - 1)
        assert b.events() == []
        run.run_until(due_ms * MS)
        assert b.events() == told_of
    b.step(4)
    assert b.engine.admitted == [(request, False, BLOCK)]


def test_a_request_that_leaves_before_the_copy_is_there_gives_all_its_room_back() -> None:
    run, a, b = two_workers()
    assert not a.begin()
    run.run_until(MS)
    request = b.submit(1, BLOCK + 1)
    assert not b.begin(1)
    assert b.engine.tier_blocks(_core.Tier.G2) == (99, 1, 0, 0)  # a place to stage
    assert b.engine.cancel(request, MS).finished
    run.run_until(2 * MS)
    b.check()
    assert b.engine.tier_blocks(_core.Tier.G1) == (8, 0, 0, 0)
    assert b.engine.tier_blocks(_core.Tier.G2) == (100, 0, 0, 0)
    assert run.next_wake_ns is None


def test_a_request_that_comes_before_the_copy_computes() -> None:
    _, a, b = two_workers()
    assert not a.begin()
    request = b.submit(1, BLOCK + 1)
    b.step(0.5)
    assert b.engine.admitted == [(request, False, 0)]


def test_a_shared_tier_is_a_publisher_of_its_own() -> None:
    run, a, b = two_workers()
    a.begin()
    run.run_until(2 * MS)
    assert of_tier(a.events(), G3) == []
    assert b.events() == []
    batch = run.take_events(_core.Tier.G3)[0]
    assert told(batch) == [("stored", G3, 1001)]
    assert batch.sequence_hashes.tolist() == [chain(1)[0].sequence_hash]
    assert len(run.take_events(_core.Tier.G3)[0]) == 0


def test_a_shared_tier_tells_what_it_evicts_and_may_keep_a_child_without_its_parent() -> None:
    config = tiers(write_through=True, g3=shared(num_blocks=2))
    run = _core.TierRun(config, BLOCK, True)
    worker = Worker(8, config, run=run, step_ms=0.0)
    worker.cache(1, 1)
    worker.cache(1, 2)
    worker.cache(2, 1)
    batch = run.take_events(_core.Tier.G3)[0]
    assert told(batch) == [
        ("stored", G3, 1001),
        ("stored", G3, 1002),
        ("removed", G3, 1001),
        ("stored", G3, 2001),
    ]
    assert batch.parent_hashes[1] == chain(1)[0].sequence_hash
    other = Worker(8, config, run=run, step_ms=0.0, name="other")
    other.now_ns = worker.now_ns
    assert other.answers(1, 2)[0][0] == "miss"  # without its parent nobody can use it


def test_both_workers_may_load_the_same_block_at_once() -> None:
    reader, writer = reader_of([(chain(1), 1)], 8)
    other = Worker(8, tiers(g3=shared()), run=reader.run, step_ms=0.0, name="other")
    other.now_ns = reader.now_ns
    start = reader.now_ns / MS
    for worker in (reader, other):
        worker.submit(1, 5)
        assert not worker.begin()
    for worker in (reader, other):  # each on its own link
        worker.step(start + 2)
        assert [cached for _, _, cached in worker.engine.admitted] == [4]
    del writer


# --- whole runs -----------------------------------------------------------------------------------------


def busy(**changes: Any) -> _core.TierConfig:
    below = {
        "g2_blocks": 12,
        "g3": shared(num_blocks=60, worker=1.0, backend=2.0),
        "g4": shared(num_blocks=90, worker=0.5, backend=1.0),
    }
    return tiers(**{**below, **changes})


@pytest.mark.parametrize("shared_tiers", [True, False], ids=["shared", "own"])
def test_twenty_runs_are_one(shared_tiers: bool) -> None:
    config = busy() if shared_tiers else busy(g3=None, g4=None)
    digests = set()
    for _ in range(20):
        result = play(crowd_of(3, 60, burst=3), config, workers=3, num_gpu_blocks=14, check=False)
        drained(result)
        digests.add(digest(result))
    assert len(digests) == 1
    assert result.tier_totals.onboards > 0
    assert bool(result.below_tokens_total[1].sum()) == shared_tiers


class Assigned(Router):
    """Sends each row where it is told."""

    def __init__(self, workers: list[int]) -> None:
        self.workers = workers

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return self.workers[request.row]


def swapped(crowd: Workload, config: _core.TierConfig, seed: int) -> list[dict[str, list[int]]]:
    """The same requests to the same neighbours, with the two workers' names exchanged."""
    rng = Random(f"assigned {seed}")
    workers = [rng.randrange(2) for _ in range(len(crowd))]
    return [
        per_request(play(crowd, config, workers=2, routing=Assigned(names), num_gpu_blocks=14, check=False))
        for names in (workers, [1 - worker for worker in workers])
    ]


CHANGES: dict[str, dict[str, Any]] = {
    "on eviction": {},
    "write-through": {"write_through": True},
    "unlimited": {"gbps": INF, "offload_batch_size": 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_how_workers_are_numbered_changes_no_result_of_a_request(change: dict[str, Any]) -> None:
    """Bursts of equal prompts keep both workers in step, so that nearly every step has a tie to break."""
    for seed in range(60):
        crowd = crowd_of(seed, requests=24, groups=1, burst=4)
        one, other = swapped(crowd, busy(**change), seed)
        assert one == other


def test_what_a_shared_tier_tells_is_whole_though_the_worker_was_not_told_of_that_tier() -> None:
    run = _core.TierRun(tiers(g3=shared()), BLOCK, True)
    config = _core.VllmEngineConfig(block_size=BLOCK, num_gpu_blocks=6)
    engine = _core.VllmEngine(config, _core.constant_timing(0.0, 1.0), tiers=tiers(), run=run)
    for tag in (1, 2, 3):
        engine.submit("r", 4 * BLOCK, 1, chain(tag))
        engine.advance(10_000 * MS)
    engine.land(100_000 * MS)
    batch, _ = run.take_events(_core.Tier.G3)
    names = batch.local_hashes.tolist()
    assert names
    assert all(name // 1000 in (1, 2, 3) for name in names)
