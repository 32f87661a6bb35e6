"""Open and closed loop: when requests arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.building import MS, ONE_MS, conversations, play, sessions, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical
from understudy.workload import ClosedLoop, OpenLoop

if TYPE_CHECKING:
    from understudy._core import StepLoad

MILLISECOND_STEPS = VllmConfig(timing=ONE_MS)


# ── Open loop ──


def test_timestamps_begin_at_zero_and_are_divided_by_the_arrival_rate_scale() -> None:
    workload = single_turns([10, 10], arrival_ms=[100, 200])
    run = run_offline(RunPlan(workload, MILLISECOND_STEPS, load=OpenLoop(arrival_rate_scale=10)))
    assert run.timeline.arrival_ns.tolist() == [0, 10 * MS]


def test_a_workload_without_timestamps_needs_a_concurrency() -> None:
    workload = single_turns([10, 10], has_arrivals=False)
    with pytest.raises(ConfigError, match=r"no timestamps; replay it closed loop \(--concurrency N, or load"):
        run_offline(RunPlan(workload))
    assert run_offline(RunPlan(workload, load=ClosedLoop(concurrency=1))).timeline.completed.all()


def test_a_session_goes_on_a_delay_after_the_turn_before() -> None:
    # Ten tokens of a millisecond, then 5 ms of thought.
    workload = sessions([(16, 10, 0), (48, 1, 5), (64, 2, 0)], arrival_ms=[3])
    run = play(workload, MILLISECOND_STEPS)
    assert run.timeline.arrival_ns.tolist() == [0, 15 * MS, 16 * MS]
    assert run.timeline.finish_ns.tolist() == [10 * MS, 16 * MS, 18 * MS]


def test_the_arrival_rate_scale_divides_delays_too() -> None:
    workload = sessions([(16, 10, 0), (48, 1, 5)])
    run = play(workload, MILLISECOND_STEPS, load=OpenLoop(arrival_rate_scale=2))
    assert run.timeline.arrival_ns.tolist() == [0, 12.5 * MS]


def test_no_turn_is_ready_before_the_one_before_has_completed() -> None:
    workload = conversations(40)
    columns = run_offline(
        RunPlan(workload, VllmConfig(block_size=16, num_gpu_blocks=200), workers=2)
    ).timeline
    for row, following in enumerate(workload.next_turn.tolist()):
        if following >= 0:
            assert columns.arrival_ns[following] == columns.finish_ns[row] + workload.delay_ns[following]


# ── Closed loop ──


def test_one_session_at_a_time_keeps_its_slot_through_its_think_time() -> None:
    workload = sessions([(16, 10, 0), (48, 5, 5)], [(16, 1, 0)], arrival_ms=[7, 0])
    run = play(workload, MILLISECOND_STEPS, load=ClosedLoop(concurrency=1))
    # The first session's two turns end at 10 and, ready at 15, at 20; only then the other one begins.
    assert run.timeline.arrival_ns.tolist() == [0, 15 * MS, 20 * MS]
    assert run.timeline.finish_ns.tolist() == [10 * MS, 20 * MS, 21 * MS]


@pytest.mark.parametrize("concurrency", [1, 3, 10])
def test_the_cap_on_sessions_is_kept_and_used(concurrency: int) -> None:
    workload = conversations(30)
    run = run_offline(RunPlan(workload, workers=2, load=ClosedLoop(concurrency=concurrency)))
    columns = run.timeline
    assert columns.completed.all()
    spans = [
        (int(columns.arrival_ns[rows].min()), int(columns.finish_ns[rows].max()))
        for rows in (workload.session == session for session in range(workload.sessions))
    ]
    for begin, _ in spans:
        alive = sum(b <= begin < e for b, e in spans)
        assert alive <= concurrency
    assert max(sum(b <= begin < e for b, e in spans) for begin, _ in spans) == min(concurrency, 30)


def test_latency_does_not_count_the_wait_for_a_slot() -> None:
    workload = single_turns([10] * 4, 5, arrival_ms=[0, 0, 0, 0])
    run = play(workload, MILLISECOND_STEPS, load=ClosedLoop(concurrency=1))
    assert run.timeline.arrival_ns.tolist() == [0, 5 * MS, 10 * MS, 15 * MS]
    assert (run.timeline.first_token_ns - run.timeline.arrival_ns).tolist() == [MS] * 4


def test_a_client_takes_its_time_between_two_requests_of_a_slot() -> None:
    workload = single_turns([10] * 4, 5, arrival_ms=[0, 0, 0, 0])
    run = play(workload, MILLISECOND_STEPS, load=ClosedLoop(concurrency=2, turnaround_ms=2.5))
    assert run.timeline.arrival_ns.tolist() == [0, 0, 7_500_000, 7_500_000]
    with pytest.raises(ConfigError, match="turnaround_ms must be a finite number from 0, got -1"):
        ClosedLoop(concurrency=1, turnaround_ms=-1.0)


def test_a_closed_loop_keeps_the_order_of_rows() -> None:
    workload = single_turns([10] * 3, 5, arrival_ms=[9, 4, 1])
    run = play(workload, MILLISECOND_STEPS, load=ClosedLoop(concurrency=1))
    assert run.timeline.arrival_ns.tolist() == [0, 5 * MS, 10 * MS]


def test_a_cap_above_the_number_of_sessions_starts_them_all() -> None:
    run = play(single_turns([10] * 3), MILLISECOND_STEPS, load=ClosedLoop(concurrency=100))
    assert run.timeline.arrival_ns.tolist() == [0, 0, 0]


# ── Data-parallel ranks ──


class TenForPrompts:
    """A step with a prompt takes 10 ms, another 1 ms."""

    def step_ms(self, step: StepLoad) -> float:
        return 10.0 if step.chunks else 1.0


def test_ranks_step_together_and_as_long_as_the_slowest() -> None:
    engine = VllmConfig(block_size=16, async_scheduling=False)
    workload = single_turns([10] * 3, 4, arrival_ms=[0, 0, 11.5])
    run = run_offline(RunPlan(workload, engine, workers=2, ranks=True, timing=TenForPrompts()))
    columns = run.timeline
    # Both prompts to 10; one token each to 11 and 12. The third comes in the middle of that step: its prompt, from 12
    # to 22, keeps the other rank waiting for its last token, too.
    assert columns.worker.tolist() == [0, 1, 0]
    assert columns.first_token_ns.tolist() == [10 * MS, 10 * MS, 22 * MS]
    assert columns.last_token_ns.tolist() == [22 * MS, 22 * MS, 25 * MS]


def test_a_rank_that_was_idle_waits_for_the_step_of_the_others() -> None:
    engine = VllmConfig(block_size=16, async_scheduling=False)
    workload = single_turns([10, 10], 2, arrival_ms=[0, 3])
    run = run_offline(RunPlan(workload, engine, workers=2, ranks=True, timing=TenForPrompts()))
    assert run.timeline.first_token_ns.tolist() == [10 * MS, 20 * MS]
    assert run.timeline.last_token_ns.tolist() == [20 * MS, 21 * MS]


class TokensOfAll:
    """A step takes a millisecond for each token of all ranks; far too long, where nobody says how many they are."""

    def step_ms(self, step: StepLoad) -> float:
        return float(step.rank_tokens or 1000)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_of_ranks_has_the_tokens_of_all_of_them(asynchronous: bool) -> None:
    engine = VllmConfig(block_size=16, async_scheduling=asynchronous)
    workload = single_turns([10, 30], [2, 3])
    run = run_offline(RunPlan(workload, engine, workers=2, ranks=True, timing=TokensOfAll()))
    # Both fit a graph and are padded to the longer prompt, then to one token each, even when the first has ended.
    assert run.timeline.first_token_ns.tolist() == [60 * MS, 60 * MS]
    assert run.timeline.last_token_ns.tolist() == [62 * MS, 64 * MS]
    assert run.facts.times is not None
    assert run.facts.times.outside_domain_share == 0


def test_experts_of_ranks_that_are_not_alike_are_timed_by_what_all_compute() -> None:
    coefficients = StepCoefficients(expert_token_ms=1.0, local_experts=1, captures=(), ranks=2)
    engine = VllmConfig(block_size=16, async_scheduling=False, timing=Physical(coefficients=coefficients))
    workload = single_turns([10, 30], [1, 1])
    together = run_offline(RunPlan(workload, engine, workers=2, ranks=True)).timeline
    assert together.first_token_ns.tolist() == [40 * MS, 40 * MS]  # no graphs, no padding
    # By itself, a rank takes the other to be as busy.
    alone = run_offline(RunPlan(workload, engine, workers=2)).timeline
    assert alone.first_token_ns.tolist() == [20 * MS, 60 * MS]
