"""Routing in a replay: who gets which request."""

from __future__ import annotations

import pytest

from replay.building import MS, ONE_MS, crowd, play, single_turns
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

MILLISECOND_STEPS = VllmConfig(timing=ONE_MS)


def test_round_robin_goes_in_turns_by_arrival() -> None:
    workload = single_turns([10] * 7, arrival_ms=[0, 5, 1, 6, 2, 4, 3])
    run = play(workload, MILLISECOND_STEPS, workers=3)
    assert run.timeline.arrival_ns.tolist() == [ms * MS for ms in (0, 5, 1, 6, 2, 4, 3)]
    assert run.timeline.worker.tolist() == [rank % 3 for rank in (0, 5, 1, 6, 2, 4, 3)]


def test_a_rejected_request_takes_no_turn() -> None:
    workload = single_turns([10, 5000, 10, 10])
    run = play(workload, VllmConfig(block_size=16, num_gpu_blocks=10), workers=2)
    assert run.timeline.worker.tolist() == [0, -1, 1, 0]


def test_random_routing_follows_its_seed() -> None:
    workload = crowd(100)
    workers = [
        run_offline(RunPlan(workload, workers=4, routing="random", seed=seed)).timeline.worker.tolist()
        for seed in (1, 1, 2)
    ]
    assert workers[0] == workers[1]
    assert workers[0] != workers[2]
    assert set(workers[0]) == {0, 1, 2, 3}


def test_least_loaded_chooses_the_fewest_outstanding_tokens_and_the_first_of_equals() -> None:
    # Prompt and requested output count: 30, 21, 22; then 21 is the least, then 22 before 30.
    workload = single_turns([20, 20, 20, 3, 3, 1], [10, 1, 2, 0, 20, 1], arrival_ms=[0, 0, 0, 0.1, 0.2, 0.3])
    run = play(workload, VllmConfig(timing=Constant(0.0, 100.0)), workers=3, routing="least_loaded")
    assert run.timeline.worker.tolist() == [0, 1, 2, 1, 2, 1]


def test_least_loaded_forgets_what_has_finished() -> None:
    workload = single_turns([500, 10, 10, 10], [50, 1, 1, 1], arrival_ms=[0, 1, 2.5, 4])
    run = play(workload, MILLISECOND_STEPS, workers=2, routing="least_loaded")
    assert run.timeline.worker.tolist() == [0, 1, 1, 1]


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(ConfigError, match="routing must be round_robin, random, least_loaded"):
        run_offline(RunPlan(single_turns([10]), routing="fair"))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"workers": 0}, {"workers": -1}, {"threads": -1}, {"seed": -1}])
def test_numbers_that_make_no_sense_are_refused(how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        run_offline(RunPlan(single_turns([10]), **how))  # type: ignore[arg-type]
