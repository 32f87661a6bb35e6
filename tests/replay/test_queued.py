"""When an engine reads a request: at once when it is idle, else at the end of the step that runs."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest

from model.replay_gen import random_case
from replay.building import MS, single_turns
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.report import Report
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical

TEN_MS = Physical(coefficients=StepCoefficients(step_ms=10.0))


@pytest.mark.parametrize(("asynchronous", "from_arrival", "from_queue"), [(True, 25, 20), (False, 15, 10)])
def test_who_comes_in_mid_step_is_read_at_its_end(
    asynchronous: bool, from_arrival: int, from_queue: int
) -> None:
    # Steps of 10 ms; the second request comes 5 ms into one. A step ahead, it waits for one more that is decided.
    workload = single_turns([16, 16], [20, 1], [0, 25])
    engine = VllmConfig(block_size=16, timing=TEN_MS, async_scheduling=asynchronous)
    run = run_offline(RunPlan(workload, engine))
    assert run.timeline.queued_ns.tolist() == [0, 30 * MS]
    latencies = Report.build(run.timeline).latencies
    assert latencies.ttft_ms[1] == from_arrival
    assert latencies.ttft_queued_ms[1] == from_queue


def test_who_comes_between_two_steps_or_to_an_idle_engine_is_read_at_once() -> None:
    workload = single_turns([16, 16, 16], [3, 1, 1], [0, 20, 500])
    run = run_offline(RunPlan(workload, VllmConfig(block_size=16, timing=TEN_MS)))
    assert run.timeline.queued_ns.tolist() == [0, 20 * MS, 500 * MS]


def test_who_has_no_seat_is_read_all_the_same_and_waits_in_the_queue() -> None:
    workload = single_turns([16, 16], [50, 1], [0, 25])
    for fast_forward in (True, False):
        engine = VllmConfig(block_size=16, timing=TEN_MS, async_scheduling=False, max_num_seqs=1)
        columns = run_offline(RunPlan(workload, engine, fast_forward=fast_forward)).timeline
        assert columns.queued_ns.tolist() == [0, 30 * MS]
        assert columns.first_admit_ns.tolist() == [0, 500 * MS]


def test_time_before_the_engine_counts_from_arrival_and_not_from_the_queue() -> None:
    workload = single_turns([16], 1)
    timing = Physical(coefficients=StepCoefficients(step_ms=10.0), front_end_ms=5.0)
    report = Report.build(run_offline(RunPlan(workload, VllmConfig(block_size=16, timing=timing))).timeline)
    # Of the 5 ms, 3 are before the engine, and 2 until the client has the token.
    assert (report.ttft_ms.mean, report.ttft_queued_ms.mean) == (15, 12)


@pytest.mark.parametrize("part", range(2))
def test_a_request_is_read_at_the_first_boundary_of_its_worker_whatever_the_load(part: int) -> None:
    waited = 0
    for seed in range(part, 160, 2):
        case = random_case(seed, timing=Constant(5.0, 3.0))
        ends: dict[int, list[int]] = {worker: [] for worker in range(case.how["workers"])}

        def end(worker: int, now_ns: int, ends: dict[int, list[int]] = ends) -> None:
            ends[worker].append(now_ns)

        try:
            run = run_offline(
                RunPlan(
                    case.workload,
                    case.config,
                    on_step_end=end,
                    **case.how,
                )
            )
            columns = run_offline(RunPlan(case.workload, case.config, **case.how)).timeline
        except WrongState:
            continue  # no progress
        assert columns.queued_ns.tolist() == run.timeline.queued_ns.tolist()
        # Steps end there, and begin where somebody is admitted.
        boundaries = {
            worker: sorted([*of, *columns.first_admit_ns[columns.worker == worker].tolist()])
            for worker, of in ends.items()
        }
        for row in np.flatnonzero(columns.first_admit_ns >= 0):
            times = boundaries[int(columns.worker[row])]
            assert columns.queued_ns[row] == times[bisect_left(times, columns.arrival_ns[row])], seed
            waited += int(columns.queued_ns[row] > columns.arrival_ns[row])
    assert waited > 100
