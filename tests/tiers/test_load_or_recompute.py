"""Load what is computed later than it arrives, and nothing else."""

from __future__ import annotations

import pytest

from tiers.building import BLOCK, Worker, tiers
from understudy import _core


class TokenTiming:
    """A prompt takes as long as the tokens of it that are not cached."""

    def __init__(self, ms_per_token: float) -> None:
        self.ms_per_token = ms_per_token

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:
        return requests * (mean_input - mean_cached) * self.ms_per_token

    def decode_ms(self, *_: int) -> float:
        return 0.0


def worker_of(ms_per_token: float, config: _core.TierConfig, num_gpu_blocks: int = 4) -> Worker:
    worker = Worker(num_gpu_blocks, config)
    worker.engine = _core.Engine(
        _core.EngineConfig(block_size=BLOCK, num_gpu_blocks=num_gpu_blocks, events=True),
        _core.python_timing(TokenTiming(ms_per_token)),
        tiers=config,
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
