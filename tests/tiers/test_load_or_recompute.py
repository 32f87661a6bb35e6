"""Load what is computed later than it arrives, and nothing else."""

from __future__ import annotations

import pytest

from tiers.building import BLOCK, INF, Worker, forked, tiers, way
from understudy import _core


class TokenTiming:
    """A prompt takes as long as the tokens of it that are not cached."""

    def __init__(self, ms_per_token: float) -> None:
        self.ms_per_token = ms_per_token

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:
        return requests * (mean_input - mean_cached) * self.ms_per_token

    def decode_ms(self, *_: int) -> float:
        return 0.0


def worker_of(
    ms_per_token: float,
    config: _core.TierConfig,
    num_gpu_blocks: int = 4,
    policy: str = "fcfs",
    run: _core.TierRun | None = None,
) -> Worker:
    worker = Worker(num_gpu_blocks, None)
    worker.run = run
    worker.engine = _core.VllmEngine(
        _core.VllmEngineConfig(
            block_size=BLOCK, num_gpu_blocks=num_gpu_blocks, events=True, scheduling_policy=policy
        ),
        _core.python_timing(TokenTiming(ms_per_token)),
        tiers=config,
        run=run,
        name="reader",
    )
    return worker


def below(worker: Worker, blocks: int) -> None:
    """Blocks of conversation 1 on the host and no longer on the device, which has 4."""
    worker.cache(1, blocks)
    worker.cache(2, 4)
    worker.play()
    assert worker.answers(1, blocks)[:blocks] == [("hit", 2)] * blocks


@pytest.mark.parametrize(("ms_per_token", "loads"), [(0.2500, 0), (0.2501, 1), (0.2499, 0)])
def test_a_load_that_takes_as_long_as_computing_has_nothing_to_win(ms_per_token: float, loads: int) -> None:
    """A block is 1 MB at 1 GB/s, or 4 tokens."""
    worker = worker_of(ms_per_token, tiers(recompute_fallback=True, write_through=True))
    below(worker, 1)
    worker.submit(1, 2 * BLOCK)
    worker.play()
    totals = worker.engine.tier_totals
    assert (totals.onboards, totals.slow_loads) == (loads, 1 - loads)


def test_whether_a_load_fails_is_decided_for_each_anew() -> None:
    worker = Worker(4, tiers(write_through=True, onboard_failure_rate=0.5, seed=3))
    below(worker, 1)
    rounds = 24
    for number in range(rounds):
        worker.submit(1, 2 * BLOCK)
        worker.play()
        worker.cache(10 + number, 4)
        worker.play()
    totals = worker.engine.tier_totals
    assert totals.onboards == rounds
    assert rounds / 4 < totals.failed_loads < rounds * 3 / 4


@pytest.mark.parametrize(("ms_per_token", "loads"), [(0.7, 1), (0.5, 0)])
def test_a_load_of_a_block_that_is_still_leaving_waits_for_it(ms_per_token: float, loads: int) -> None:
    """Two blocks leave in 2 ms, and one of them comes back in 0.5 ms: 2.5 ms against 4 tokens."""
    config = tiers(recompute_fallback=True, host=way(1.0, 2.0), offload_batch_size=2)
    worker = worker_of(ms_per_token, config, policy="priority")
    worker.cache(1, 2)
    worker.submit(2, 4 * BLOCK, priority=1)
    assert not worker.begin()  # until the blocks of 1 have left
    assert worker.answers(1, 2) == [("pending", 2)] * 2
    worker.submit(1, 1 + BLOCK)
    worker.play()
    assert worker.engine.tier_totals.onboards == loads


def test_what_is_not_worth_a_load_is_cut_where_the_tier_changes() -> None:
    """Of three blocks the last two are on a slow disk: neither is loaded, though one alone would be worth it.

    A block takes 4 ms to compute, 5 ms from the disk and 1 ms from the host: 13 against 12, and 7 against 8.
    """
    disk = _core.SharedTierConfig(num_blocks=100, worker=way(INF, 0.2), backend=way(INF))
    worker = worker_of(1.0, tiers(5, g3=disk, recompute_fallback=True, write_through=True))
    worker.cache(1, 3)
    worker.cache(2, 4)
    assert worker.answers(1, 3) == [("hit", 2), ("hit", 3), ("hit", 3)]
    worker.submit(1, 3 * BLOCK + 1)
    worker.play()
    assert worker.engine.tier_totals.onboarded_blocks == 1


@pytest.mark.parametrize(("ms_per_token", "blocks"), [(0.11, 4), (0.1, 0)])
def test_of_a_copy_to_a_shared_tier_only_what_the_tier_lacks_takes_time(
    ms_per_token: float, blocks: int
) -> None:
    """The disk has three of four blocks, and the last is there in 1.6 ms; 16 tokens are computed in 1.76 or in 1.6."""
    disk = _core.SharedTierConfig(num_blocks=100, worker=way(0.625, INF), backend=way(INF))
    config = tiers(gbps=INF, g3=disk, recompute_fallback=True, write_through=True)
    run = _core.TierRun(config, BLOCK, True)
    before = Worker(64, config, run=run, step_ms=0.0, name="before")
    before.cache(1, 3)
    writer = Worker(64, config, run=run, step_ms=0.0, name="writer")
    writer.submit(forked(1, 3, 1), 4 * BLOCK)
    writer.step(before.now_ns / 1e6)
    reader = worker_of(ms_per_token, config, 64, run=run)
    reader.now_ns = writer.now_ns
    reader.submit(forked(1, 3, 1), 4 * BLOCK + 1)
    reader.begin()
    assert reader.engine.tier_totals.onboarded_blocks == blocks


@pytest.mark.parametrize(("ms_per_token", "blocks"), [(1.51, 2), (1.49, 0)])
def test_a_copy_to_a_shared_tier_that_is_queued_takes_as_long_as_those_before_it(
    ms_per_token: float, blocks: int
) -> None:
    """Copies of two blocks go to the disk one at a time, 4 ms each: the third is there after 12, or 8 tokens."""
    disk = _core.SharedTierConfig(
        num_blocks=100, worker=way(0.5, INF), backend=way(INF), offload_concurrency=1
    )
    config = tiers(gbps=INF, g3=disk, recompute_fallback=True, write_through=True)
    run = _core.TierRun(config, BLOCK, True)
    writer = Worker(64, config, run=run, step_ms=0.0, name="writer")
    for number in (1, 2, 3):
        writer.submit(number, 2 * BLOCK)
    writer.step()
    reader = worker_of(ms_per_token, config, 64, run=run)
    reader.submit(3, 2 * BLOCK + 1)
    reader.begin()
    assert reader.engine.tier_totals.onboarded_blocks == blocks
