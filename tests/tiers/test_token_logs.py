"""Workers side by side forget steps early, and the gaps between tokens are those of workers that are played alone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import single_turns
from tiers.building import shared, tiers
from tiers.fleets import play
from understudy import _core

if TYPE_CHECKING:
    from understudy.workload import Workload

NOTHING_QUALIFIES = tiers(g3=shared(), write_through=True, min_reuse=2**32 - 1)
"""A tier that workers share and never use: they meet."""
EARLY = 4096
"""So many steps are kept before those are forgotten that nobody needs."""


def long_lives(seed: int, longest: int) -> Workload:
    """Requests of some hundred tokens each, and one that stays through many times as many steps."""
    rng = Random(f"lives {seed}")
    prompts = [rng.randrange(1, 30) for _ in range(900)]
    outputs = [rng.randrange(1, 400) for _ in prompts]
    outputs[3] = longest
    arrivals, now_ms = [], 0.0
    for _ in prompts:
        arrivals.append(now_ms)
        now_ms += rng.randrange(40)
    return single_turns(prompts, outputs, arrivals)


def run(workload: Workload, config: _core.TierConfig | None = None, **how: Any) -> _core.FleetResult:
    engine: dict[str, Any] = {"block_size": 16, "num_gpu_blocks": 650, "max_num_seqs": 6, "check": False}
    return play(workload, config, workers=2, timing=_core.polynomial_timing(), **{**engine, **how})


def gaps(result: _core.FleetResult) -> dict[int, int]:
    return dict(zip(result.itl_ns.tolist(), result.itl_count.tolist(), strict=True))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_gaps_are_those_of_workers_alone(seed: int, asynchronous: bool) -> None:
    workload = long_lives(seed, longest=10_000)
    alone = run(workload, async_scheduling=asynchronous)
    assert alone.steps > 2 * 3 * EARLY
    assert alone.preemptions.sum() > 0
    for how in (
        {"config": NOTHING_QUALIFIES},
        {"config": NOTHING_QUALIFIES, "fast_forward": False},
        {"on_step": lambda *_: None},
    ):
        together = run(workload, async_scheduling=asynchronous, **how)
        assert together.steps == alone.steps
        assert gaps(together) == gaps(alone)


def test_steps_that_concern_nobody_are_forgotten_early() -> None:
    kept = 0

    def look(_worker: int, engine: _core.VllmEngine, _ended: bool) -> None:
        nonlocal kept
        kept = max(kept, engine.steps_kept)

    result = run(long_lives(1, longest=400), on_step=look)
    assert result.steps > 2 * 3 * EARLY
    assert kept <= EARLY
