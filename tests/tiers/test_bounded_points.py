"""Long runs keep a bounded number of points, and those are of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay.building import single_turns
from tiers.building import MS, shared, tiers, way
from tiers.fleets import play

if TYPE_CHECKING:
    from understudy import _core

MOST = 2048  # points of a tier, or of a worker
REQUESTS = 5000


def long_run(every_ms: int) -> _core.FleetResult:
    """Prompts of a block each, as far apart: every one of them changes the host and the disk."""
    workload = single_turns(
        [4] * REQUESTS,
        [1] * REQUESTS,
        arrival_ms=[every_ms * i for i in range(REQUESTS)],
        content=[[i] for i in range(REQUESTS)],
        trace_block_size=4,
    )
    below = tiers(10_000, g3=shared(10_000, 10.0), host=way(10.0), write_through=True)
    return play(workload, below, num_gpu_blocks=24, check=False)


def test_a_tiers_blocks_over_time_are_thinned_evenly_and_from_the_second_on() -> None:
    run = long_run(every_ms=2)
    times_ns, blocks = run.tiers[-1].residency
    assert MOST / 4 < len(times_ns) < MOST
    assert times_ns[0] < 4 * MS
    assert (abs(blocks - times_ns / (2 * MS)) <= 3).all()
    gaps_ns = times_ns[1:] - times_ns[:-1]
    # What comes after a thinning comes at half of the gaps that it has left, or more.
    assert gaps_ns[-100:].mean() > 0.45 * gaps_ns[:100].mean()
    assert run.tiers[-1].resident_blocks == REQUESTS


def test_samples_on_a_coarser_grid_are_the_last_state_until_each_point() -> None:
    run = long_run(every_ms=10)
    times_ns = run.sample_time_ns
    assert MOST / 4 < len(times_ns) <= MOST + 1
    # A request ends 2 ms after it came, and its block is on the host a moment later.
    assert (abs(run.sample_host_blocks - times_ns / (10 * MS)) <= 1.5).all()
