"""When events of tiers are visible: on tiers below the device at the moment, in every mode."""

from __future__ import annotations

from typing import Any

import pytest

from tiers.building import MS, Worker, shared, tiers
from tiers.fleets import crowd_of, play
from understudy import _core

G1, G2, G3 = 1, 2, 3


def timed(batch: _core.EventBatch, times_ns: Any) -> list[tuple[int, str, int, int]]:
    """(time, stored or removed, tier, local hash) of each row."""
    rows = zip(
        times_ns.tolist(),
        batch.kinds.tolist(),
        batch.tiers.tolist(),
        batch.local_hashes.tolist(),
        strict=True,
    )
    return [(time, "stored" if kind == 0 else "removed", tier, block) for time, kind, tier, block in rows]


def test_a_removal_is_told_at_once_while_a_worker_waits_for_room() -> None:
    """A block of 1 MB at 0.05 MB/ms: the copy takes 20 s, its removal is told when it is evicted."""
    worker = Worker(1, tiers(gbps=0.00005))
    worker.cache(1, 1)
    worker.engine.take_events()
    worker.submit(2, 4)
    begun_ns = worker.now_ns
    assert not worker.begin()
    assert timed(*worker.engine.take_events()) == [(begun_ns, "removed", G1, 1001)]
    worker.play()
    rows = timed(*worker.engine.take_events())
    assert rows[0] == (begun_ns + 20_000 * MS, "stored", G2, 1001)


def test_a_landing_on_an_idle_worker_is_told_when_it_lands() -> None:
    worker = Worker(4, tiers(write_through=True, gbps=0.1), step_ms=7.0)
    worker.submit(1, 4)
    worker.step()
    assert worker.engine.idle
    assert timed(*worker.engine.take_events()) == [(7 * MS, "stored", G1, 1001)]
    worker.submit(2, 4)
    worker.begin(200.0)
    assert timed(*worker.engine.take_events()) == [(17 * MS, "stored", G2, 1001)]


def test_a_landing_in_the_middle_of_a_step_is_told_then_and_the_step_at_its_end() -> None:
    worker = Worker(4, tiers(write_through=True), step_ms=7.0)
    worker.submit(1, 8, 2)
    worker.step()
    worker.engine.take_events()
    worker.submit(2, 4)
    worker.begin()
    worker.engine.land(8 * MS)
    assert timed(*worker.engine.take_events()) == []
    worker.engine.land(9 * MS)
    assert timed(*worker.engine.take_events()) == [(9 * MS, "stored", G2, 1001), (9 * MS, "stored", G2, 1002)]
    worker.end()
    assert timed(*worker.engine.take_events()) == [(14 * MS, "stored", G1, 2001)]


def test_an_idle_engine_whose_copy_has_landed_is_in_order() -> None:
    worker = Worker(4, tiers(write_through=True), check=True)
    worker.submit(1, 4)
    worker.step()
    worker.engine.land(50 * MS)
    worker.engine.check()


def _rows_by_tier(result: _core.FleetResult, workers: int) -> dict[int, list[tuple[int, str, int]]]:
    rows: dict[int, list[tuple[int, str, int]]] = {G1: [], G2: []}
    for worker in range(workers):
        for time, kind, tier, block in timed(*result.events(worker).rows()):
            rows[tier].append((time, kind, block))
    return {tier: sorted(some) for tier, some in rows.items()}


@pytest.mark.parametrize("seed", range(12))
def test_workers_that_meet_tell_their_events_at_the_same_times_as_one_alone(seed: int) -> None:
    """Routing that chooses among one, and recorded steps, change no time of any event."""
    crowd = crowd_of(seed, requests=24)
    config = tiers(write_through=bool(seed % 2), gbps=0.2)
    alone = _rows_by_tier(play(crowd, config, events=True), 1)
    assert alone[G2]
    for how in ({"routing": "least_loaded"}, {"on_step": lambda *_: None}):
        assert _rows_by_tier(play(crowd, config, events=True, **how), 1) == alone, how


def test_a_tier_of_the_run_tells_when_its_copy_has_landed() -> None:
    config = tiers(write_through=True, g3=shared())
    run = _core.TierRun(config, 4, events=True, check=True)
    worker = Worker(4, config, run)
    worker.submit(1, 4)
    worker.step()
    run.run_until(100 * MS)
    batch, times_ns = run.take_events(_core.Tier.G3)
    assert timed(batch, times_ns) == [(3 * MS, "stored", G3, 1001)]
    assert timed(*worker.engine.take_events())[-1] == (2 * MS, "stored", G2, 1001)
