"""What changes between two steps of a fast-forward shows in the sample of the next one, as it does when stepping."""

from __future__ import annotations

from typing import Any

from tiers.building import MS, chain, shared, tiers
from understudy import _core

BLOCK = 64  # tokens: requests decode for long before they have a turn


def engine_on(
    config: _core.TierConfig, run: _core.TierRun, name: str, fast_forward: bool
) -> _core.VllmEngine:
    """One of those that share the run; every step takes a millisecond."""
    settings = _core.VllmEngineConfig(block_size=BLOCK, num_gpu_blocks=20)
    engine = _core.VllmEngine(settings, _core.constant_timing(1.0, 1.0), tiers=config, run=run, name=name)
    engine.set_fast_forward(fast_forward)
    return engine


def samples_of(engine: _core.VllmEngine) -> list[tuple[Any, ...]]:
    """(ms, blocks in use, cached, on the host)."""
    columns = _core.RunColumns(0, tiers=True)
    columns.add_engine(0, engine)
    result = columns.take()
    blocks = (result.sample_used_blocks, result.sample_cached_blocks, result.sample_host_blocks)
    return list(zip((result.sample_time_ns / MS).tolist(), *(of.tolist() for of in blocks), strict=True))


def prefetching(fast_forward: bool) -> list[tuple[Any, ...]]:
    """Two blocks of the host come up at 10 ms a block, while somebody decodes."""
    config = tiers(gbps=0.1, write_through=True)
    engine = engine_on(config, _core.TierRun(config, BLOCK, False), "worker", fast_forward)
    engine.submit("before", 2 * BLOCK, 1, chain(1))
    engine.advance(100 * MS)
    engine.skip_to(100 * MS)
    engine.forget_cache(100 * MS)
    engine.submit("decodes", 10, 50, chain(2))
    engine.advance(110 * MS)
    assert engine.prefetch(chain(1)[:2], engine.now_ns)
    engine.advance(200 * MS)
    return samples_of(engine)


def test_a_prefetch_in_a_fast_forward_shows_from_the_next_step_on() -> None:
    stepped = prefetching(fast_forward=False)
    assert (110.0, 3, 0, 2) in stepped
    assert prefetching(fast_forward=True) == stepped


def dropping(fast_forward: bool) -> list[tuple[Any, ...]]:
    """Two blocks of another worker's come to the shared tier at 43 ms; who waited for them there has been cancelled."""
    config = tiers(write_through=True, g3=shared(worker=0.05))
    run = _core.TierRun(config, BLOCK, False)
    writer, reader = (engine_on(config, run, name, fast_forward) for name in ("writer", "reader"))
    writer.submit("writes", 2 * BLOCK + 1, 1, chain(1))
    writer.advance(4 * MS)
    reader.skip_to(4 * MS)
    reader.submit("decodes", 10, 50, chain(2))
    waits = reader.submit("waits", 2 * BLOCK + 1, 1, chain(1))
    reader.advance(8 * MS)
    assert reader.parked == 1
    assert reader.cancel(waits, reader.now_ns).finished
    reader.advance(200 * MS)
    assert reader.idle
    return samples_of(reader)


def test_a_load_that_another_workers_landing_drops_shows_from_the_next_step_on() -> None:
    stepped = dropping(fast_forward=False)
    assert (44.0, 1, 0, 0) in stepped
    assert dropping(fast_forward=True) == stepped
