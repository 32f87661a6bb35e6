"""Offline replay: who gets which request and when, and what the run reports of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from model.replay_gen import COLUMNS, random_case
from model.unlimited_cache import hits_one_after_another
from replay.building import MS, ONE_MS, play, sessions, single_turns
from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant
from understudy.errors import ConfigError, WrongState
from understudy.replay.offline import OfflineRun, run_offline
from understudy.replay.timeline import Status
from understudy.workload import (
    ClosedLoop,
    Normal,
    OpenLoop,
    Poisson,
    SharedRatio,
    SyntheticSpec,
    SystemPrompts,
    Workload,
    synthesise,
)

MILLISECOND_STEPS = VllmConfig(timing=ONE_MS)


def crowd(sessions: int = 60, **changes: Any) -> Workload:
    spec: dict[str, Any] = {
        "sessions": sessions,
        "prompt_tokens": Normal(mean=300, std=120),
        "output_tokens": Normal(mean=20, std=8),
        "arrivals": Poisson(qps=40),
        "prefixes": SharedRatio(groups=3, ratio=0.5),
    }
    return synthesise(SyntheticSpec(**{**spec, **changes}))


def conversations(count: int = 25, **changes: Any) -> Workload:
    return crowd(
        count,
        turns=Normal(mean=3, std=1),
        followup_tokens=Normal(mean=40, std=10),
        think_time_ms=Normal(mean=50, std=30),
        **changes,
    )


def assert_same_columns(one: OfflineRun, other: OfflineRun, *, but: tuple[str, ...] = ()) -> None:
    for name in COLUMNS:
        if name not in but:
            np.testing.assert_array_equal(getattr(one.timeline, name), getattr(other.timeline, name), name)


# ── One deterministic order ──


def test_twenty_runs_have_one_digest() -> None:
    workload = conversations()
    runs = [run_offline(workload, workers=3, routing="random", seed=7) for _ in range(20)]
    assert len({run.facts["digest"] for run in runs}) == 1


@pytest.mark.parametrize("routing", ["round_robin", "random"])
def test_any_number_of_threads_gives_the_same_run(routing: Any) -> None:
    workload = crowd()
    engine = VllmConfig(block_size=16, num_gpu_blocks=100)
    runs = [
        run_offline(workload, engine, workers=5, routing=routing, seed=3, threads=threads)
        for threads in (1, 2, 3, 16)
    ]
    assert len({run.facts["digest"] for run in runs}) == 1
    for run in runs[1:]:
        assert_same_columns(run, runs[0])


@pytest.mark.parametrize("part", range(3))
def test_workers_played_one_by_one_fare_as_in_one_order_of_all_events(part: int) -> None:
    # Routing by load cannot be played worker by worker; with one worker it decides nothing.
    compared = 0
    for seed in range(part, 150, 3):
        case = random_case(seed, single_turns=True)
        how = {**case.how, "workers": 1}
        try:
            alone = run_offline(case.workload, case.config, **how)
        except WrongState as error:
            with pytest.raises(WrongState, match="no progress"):
                run_offline(case.workload, case.config, **{**how, "routing": "least_loaded"})
            assert "no progress" in str(error)
            continue
        together = run_offline(case.workload, case.config, **{**how, "routing": "least_loaded"})
        assert_same_columns(alone, together)
        assert alone.facts["digest"] == together.facts["digest"]
        compared += 1
    assert compared > 40


def test_several_workers_fare_alike_in_both_ways_of_playing() -> None:
    # A second turn far away makes the workers meet, and changes nothing for the others.
    workload = crowd(40)
    rows = len(workload)
    last = int(workload.arrival_ns[-1])
    joined = Workload(
        arrival_ns=[*workload.arrival_ns, last, last],
        prompt_tokens=[*workload.prompt_tokens, 1, 1],
        output_tokens=[*workload.output_tokens, 1, 1],
        hash_offsets=[*workload.hash_offsets, *(int(workload.hash_offsets[-1]) + i for i in (1, 2))],
        hash_ids=[*workload.hash_ids, 10**6, 10**6 + 1],
        trace_block_size=workload.trace_block_size,
        session=[*workload.session, rows, rows],
        turn=[0] * (rows + 1) + [1],
        delay_ns=[0] * (rows + 1) + [3600 * 1000 * MS],
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=90, max_num_seqs=4)
    together = run_offline(joined, engine, workers=3).timeline
    alone = run_offline(joined.take(range(rows + 1)), engine, workers=3).timeline
    for name in (
        "first_admit_ns",
        "first_token_ns",
        "finish_ns",
        "cached_tokens_total",
        "preemptions",
        "worker",
    ):
        np.testing.assert_array_equal(getattr(alone, name), getattr(together, name)[: rows + 1], name)


def test_checking_changes_nothing() -> None:
    workload = conversations()
    engine = VllmConfig(block_size=16, num_gpu_blocks=120)
    plain = run_offline(workload, engine, workers=2)
    checked = run_offline(workload, engine, workers=2, check=True)
    assert plain.facts["digest"] == checked.facts["digest"]


def test_everything_that_happens_to_a_request_is_in_the_digest() -> None:
    workload = crowd(10)
    base = run_offline(workload, workers=2).facts["digest"]
    assert run_offline(workload, workers=1).facts["digest"] != base
    assert run_offline(workload, VllmConfig(speedup_ratio=1.0001), workers=2).facts["digest"] != base
    assert run_offline(workload, VllmConfig(enable_prefix_caching=False), workers=2).facts["digest"] != base


# ── Routing ──


def test_round_robin_goes_in_turns_by_arrival() -> None:
    workload = single_turns([10] * 7, arrival_ms=[0, 5, 1, 6, 2, 4, 3])
    run = play(workload, MILLISECOND_STEPS, workers=3)
    assert run.timeline.arrival_ns.tolist() == [ms * MS for ms in range(7)]  # rows are in order of arrival
    assert run.timeline.worker.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_rejected_request_takes_no_turn() -> None:
    workload = single_turns([10, 5000, 10, 10])
    run = play(workload, VllmConfig(block_size=16, num_gpu_blocks=10), workers=2)
    assert run.timeline.worker.tolist() == [0, -1, 1, 0]


def test_random_routing_follows_its_seed() -> None:
    workload = crowd(100)
    workers = [
        run_offline(workload, workers=4, routing="random", seed=seed).timeline.worker.tolist()
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
    with pytest.raises(ConfigError, match="routing must be round_robin, random or least_loaded"):
        run_offline(single_turns([10]), routing="kv")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"workers": 0}, {"workers": -1}, {"threads": -1}, {"seed": -1}])
def test_numbers_that_make_no_sense_are_refused(how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        run_offline(single_turns([10]), **how)  # type: ignore[arg-type]


# ── Threads ──


@pytest.mark.parametrize(
    ("workload", "how"),
    [
        (single_turns([10, 10]), {"routing": "least_loaded"}),
        (single_turns([10, 10]), {"load": ClosedLoop(concurrency=1)}),
        (sessions([(10, 1, 0), (30, 1, 0)]), {}),
    ],
    ids=["routing by load", "closed loop", "sessions"],
)
def test_threads_are_refused_where_workers_depend_on_each_other(
    workload: Workload, how: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="independent workers: open loop, single-turn requests"):
        run_offline(workload, workers=2, threads=2, **how)
    assert run_offline(workload, workers=2, threads=1, **how).timeline.completed.all()


# ── Open loop ──


def test_timestamps_begin_at_zero_and_are_divided_by_the_speed_up() -> None:
    workload = single_turns([10, 10], arrival_ms=[100, 200])
    run = run_offline(workload, MILLISECOND_STEPS, load=OpenLoop(speed_up=10))
    assert run.timeline.arrival_ns.tolist() == [0, 10 * MS]


def test_a_workload_without_timestamps_needs_a_concurrency() -> None:
    workload = single_turns([10, 10], has_arrivals=False)
    with pytest.raises(ConfigError, match="no timestamps: replay it closed loop"):
        run_offline(workload)
    assert run_offline(workload, load=ClosedLoop(concurrency=1)).timeline.completed.all()


def test_a_session_goes_on_a_delay_after_the_turn_before() -> None:
    # Ten tokens of a millisecond, then 5 ms of thought.
    workload = sessions([(16, 10, 0), (48, 1, 5), (64, 2, 0)], arrival_ms=[3])
    run = play(workload, MILLISECOND_STEPS)
    assert run.timeline.arrival_ns.tolist() == [0, 15 * MS, 16 * MS]
    assert run.timeline.finish_ns.tolist() == [10 * MS, 16 * MS, 18 * MS]


def test_the_speed_up_divides_delays_too() -> None:
    workload = sessions([(16, 10, 0), (48, 1, 5)])
    run = play(workload, MILLISECOND_STEPS, load=OpenLoop(speed_up=2))
    assert run.timeline.arrival_ns.tolist() == [0, 12.5 * MS]


def test_no_turn_is_ready_before_the_one_before_has_completed() -> None:
    workload = conversations(40)
    columns = run_offline(workload, VllmConfig(block_size=16, num_gpu_blocks=200), workers=2).timeline
    sorted_load = workload.sorted_by_arrival()
    for row, following in enumerate(sorted_load.next_turn.tolist()):
        if following >= 0:
            assert columns.arrival_ns[following] == columns.finish_ns[row] + sorted_load.delay_ns[following]


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
    run = run_offline(workload, workers=2, load=ClosedLoop(concurrency=concurrency))
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


def test_a_closed_loop_keeps_the_order_of_rows() -> None:
    workload = single_turns([10] * 3, 5, arrival_ms=[9, 4, 1])
    run = play(workload, MILLISECOND_STEPS, load=ClosedLoop(concurrency=1))
    assert run.timeline.arrival_ns.tolist() == [0, 5 * MS, 10 * MS]


def test_a_cap_above_the_number_of_sessions_starts_them_all() -> None:
    run = play(single_turns([10] * 3), MILLISECOND_STEPS, load=ClosedLoop(concurrency=100))
    assert run.timeline.arrival_ns.tolist() == [0, 0, 0]


# ── What cannot run ──

SMALL = VllmConfig(block_size=16, num_gpu_blocks=10, timing=ONE_MS)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_a_request_that_can_never_fit_is_rejected_with_a_reason_and_the_rest_go_on(routing: Any) -> None:
    workload = single_turns([10, 161, 150, 20], [1, 1, 12, 5], arrival_ms=[0, 1, 2, 3])
    run = play(workload, SMALL, routing=routing)
    assert run.timeline.status.tolist() == [0, Status.REJECTED, Status.REJECTED, 0]
    assert run.timeline.finish_ns[1:3].tolist() == [MS, 2 * MS]
    assert run.timeline.output_tokens.tolist() == [1, 0, 0, 5]
    assert run.timeline.reject_reasons == {
        1: "prompt and output of 162 tokens need 11 blocks of 16, num_gpu_blocks=10",
        2: "prompt and output of 162 tokens need 11 blocks of 16, num_gpu_blocks=10",
    }


def test_a_request_that_fits_to_the_last_slot_runs() -> None:
    # The last token is never computed, so 161 tokens need no eleventh block.
    run = play(single_turns([160, 150], [1, 11], arrival_ms=[0, 100]), SMALL)
    assert run.timeline.output_tokens.tolist() == [1, 11]


def test_a_prompt_that_fills_the_context_window_is_rejected_and_others_stop_at_it() -> None:
    engine = VllmConfig(max_model_len=100, timing=ONE_MS)
    run = play(single_turns([100, 99, 90, 200], [1, 5, 50, 1]), engine)
    assert run.timeline.status.tolist() == [Status.REJECTED, 0, 0, Status.REJECTED]
    assert run.timeline.output_tokens.tolist() == [0, 1, 10, 0]
    assert "max_model_len=100" in run.timeline.reject_reasons[0]


def test_without_chunked_prefill_a_prompt_beyond_the_budget_is_rejected() -> None:
    engine = VllmConfig(max_num_batched_tokens=100, enable_chunked_prefill=False, timing=ONE_MS)
    run = play(single_turns([101, 100]), engine)
    assert run.timeline.status.tolist() == [Status.REJECTED, 0]
    assert "max_num_batched_tokens=100" in run.timeline.reject_reasons[0]
    threshold = VllmConfig(
        max_num_batched_tokens=100,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=50,
        timing=ONE_MS,
    )
    assert play(single_turns([101, 100]), threshold).timeline.completed.all()


@pytest.mark.parametrize("load", [OpenLoop(), ClosedLoop(concurrency=1)], ids=["open", "closed"])
def test_a_rejected_turn_does_not_hold_up_its_session(load: OpenLoop | ClosedLoop) -> None:
    workload = sessions([(16, 5, 0), (400, 1, 2), (20, 1, 3)], [(16, 1, 0)])
    run = play(workload, SMALL, load=load)
    columns = run.timeline
    assert columns.status.tolist() == [0, Status.REJECTED, 0, 0]
    assert columns.arrival_ns[1] == columns.finish_ns[0] + 2 * MS
    assert columns.finish_ns[1] == columns.arrival_ns[1]
    assert columns.arrival_ns[2] == columns.finish_ns[1] + 3 * MS
    if isinstance(load, ClosedLoop):
        assert columns.arrival_ns[3] == columns.finish_ns[2]


def test_a_run_where_everything_is_rejected_ends() -> None:
    run = play(single_turns([1000] * 5), SMALL, load=ClosedLoop(concurrency=2))
    assert (run.timeline.status == Status.REJECTED).all()
    assert run.timeline.steps == 0


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_a_run_without_progress_ends_with_an_error_that_says_who_is_stuck(routing: Any) -> None:
    # Without chunked prefill a preempted request returns whole: here more than 20 tokens into a budget of 20.
    workload = single_turns([16, 16], 30, arrival_ms=[0, 0])
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=12,
        max_num_batched_tokens=20,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    with pytest.raises(
        WrongState, match=r"no progress: 1 requests wait .*first row 1 \(\d+ tokens\)"
    ) as caught:
        run_offline(workload, engine, routing=routing)
    assert "12 of 12 blocks are free" in str(caught.value)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_requests_that_preempt_each_other_for_ever_end_with_an_error(routing: Any) -> None:
    # The oldest gives way: two long prompts in small chunks, neither of which fits beside the other.
    workload = single_turns([60, 60, 60], 8)
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=17,
        long_prefill_token_threshold=4,
        preemption_mode="fifo",
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
        timing=ONE_MS,
    )
    with pytest.raises(WrongState, match="preempt each other without end"):
        run_offline(workload, engine, routing=routing)
    newest = msgspec.structs.replace(engine, preemption_mode="lifo")
    assert run_offline(workload, newest, routing=routing).timeline.completed.all()


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_a_step_that_only_preempts_is_not_the_end(routing: Any) -> None:
    # Under priorities the request at the cursor can be the victim before anybody was scheduled.
    workload = single_turns([8, 8], 12, arrival_ms=[0, 0.5], priority=[5, 0])
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=5,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        timing=ONE_MS,
    )
    run = run_offline(workload, engine, routing=routing)
    assert run.timeline.completed.all()
    assert run.timeline.preemptions.tolist() == [1, 0]


# ── Small and empty ──


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
@pytest.mark.parametrize("load", [OpenLoop(), ClosedLoop(concurrency=3)], ids=["open", "closed"])
def test_an_empty_workload_is_a_run_without_requests(routing: Any, load: OpenLoop | ClosedLoop) -> None:
    run = play(single_turns([]), workers=2, routing=routing, load=load)
    assert len(run.timeline) == 0
    assert run.timeline.steps == 0


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_request_without_output_completes_after_its_prefill(routing: Any, asynchronous: bool) -> None:
    engine = VllmConfig(timing=Constant(3.0, 1.0), async_scheduling=asynchronous)
    run = play(single_turns([10, 10], [0, 2]), engine, routing=routing)
    columns = run.timeline
    assert columns.completed.all()
    assert columns.finish_ns.tolist() == [4 * MS, 5 * MS]  # beside one that decodes
    assert columns.last_token_ns[0] == -1
    alone = play(single_turns([10], [0]), engine, routing=routing).timeline
    assert alone.finish_ns.tolist() == [3 * MS]


def test_a_thousand_workers_live_in_one_process() -> None:
    workload = single_turns([32] * 3000, 3, arrival_ms=[row / 10 for row in range(3000)])
    run = run_offline(workload, VllmConfig(num_gpu_blocks=64), workers=1000)
    assert np.bincount(run.timeline.worker).tolist() == [3] * 1000
    assert run.timeline.completed.all()
    together = run_offline(workload, VllmConfig(num_gpu_blocks=64), workers=1000, routing="least_loaded")
    assert together.timeline.completed.all()


# ── Scheduling, as a replay shows it ──


def test_a_budget_is_spent_on_one_prompt_after_the_other() -> None:
    # Two prompts of 8 and a budget of 4: the first computes 4 and 4, the second waits meanwhile.
    engine = VllmConfig(block_size=4, num_gpu_blocks=100, max_num_batched_tokens=4, timing=Constant(1.0, 1.0))
    columns = play(single_turns([8, 8], [1, 1]), engine).timeline
    assert columns.first_token_ns[0] == 3 * MS  # steps of 1 (prefill) and 2 (prefill and token) ms
    assert columns.first_admit_ns.tolist() == [0, 3 * MS]


def test_running_requests_take_the_budget_before_waiting_ones() -> None:
    engine = VllmConfig(block_size=4, num_gpu_blocks=100, max_num_batched_tokens=4, timing=ONE_MS)
    columns = play(single_turns([4, 8], [6, 1], arrival_ms=[0, 0.5]), engine).timeline
    # One token of four is the first request's own: 3 + 3 + 2 for the prompt of 8.
    assert columns.first_token_ns.tolist() == [MS, 4 * MS]


def test_growth_preempts_the_newest_which_returns_first() -> None:
    engine = VllmConfig(block_size=4, num_gpu_blocks=6, scheduler_reserve_full_isl=False, timing=ONE_MS)
    columns = play(single_turns([8, 8], [8, 8], trace_block_size=4), engine).timeline
    assert columns.completed.all()
    assert columns.preemptions.tolist() == [0, 1]
    # The first signal's cached tokens are those of the first admission; a later one finds its own blocks.
    assert columns.cached_tokens_first.tolist() == [0, 0]
    assert columns.cached_tokens_total[1] > 0
    assert columns.output_tokens.tolist() == [8, 8]


def test_a_small_request_does_not_overtake_one_that_does_not_fit() -> None:
    engine = VllmConfig(block_size=4, num_gpu_blocks=6, timing=ONE_MS)
    columns = play(single_turns([16, 12, 4], [3, 1, 1]), engine).timeline
    assert columns.finish_ns[0] == 3 * MS
    assert columns.first_admit_ns.tolist() == [0, 3 * MS, 3 * MS]
    assert columns.preemptions.sum() == 0


def test_a_wholly_cached_prompt_computes_its_last_block_again() -> None:
    workload = single_turns([8, 8], arrival_ms=[0, 10], content=[range(2), range(2)], trace_block_size=4)
    columns = play(workload, VllmConfig(block_size=4, num_gpu_blocks=100)).timeline
    assert columns.cached_tokens_first.tolist() == [0, 4]


def test_a_sampled_token_takes_a_block_only_when_it_is_computed() -> None:
    # Prompts of 8 fill two blocks each; four blocks suffice for one token more, not for two.
    engine = VllmConfig(block_size=4, num_gpu_blocks=4, timing=ONE_MS)
    last = play(single_turns([8, 8], [1, 1], trace_block_size=4), engine).timeline
    assert last.preemptions.sum() == 0
    assert last.finish_ns.tolist() == [MS, MS]
    more = play(single_turns([8, 8], [2, 2], trace_block_size=4), engine).timeline
    assert more.preemptions.tolist() == [0, 1]


def test_identical_requests_hit_more_and_more() -> None:
    workload = single_turns([64] * 4, 1, arrival_ms=[0, 10, 20, 30], content=[range(4)] * 4)
    run = play(workload, VllmConfig(block_size=16, num_gpu_blocks=100, timing=ONE_MS))
    assert run.timeline.cached_tokens_first.tolist() == [0, 48, 48, 48]
    assert run.timeline.stored_blocks == 4 + 3  # the last block of each repetition is stored again


@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_a_pool_of_500_blocks_serves_200_long_requests(shared: bool, caching: bool, chunked: bool) -> None:
    content = [range(63)] * 200 if shared else None
    workload = single_turns([1000] * 200, 100, content=content)
    engine = VllmConfig(num_gpu_blocks=500, enable_prefix_caching=caching, enable_chunked_prefill=chunked)
    columns = run_offline(workload, engine).timeline
    assert columns.completed.all()
    assert (columns.output_tokens == 100).all()
    assert (columns.stored_blocks > 0) == caching


def test_identical_requests_under_pressure_all_get_their_tokens() -> None:
    workload = single_turns([8] * 8, 4, content=[range(2)] * 8, trace_block_size=4)
    engine = VllmConfig(block_size=4, num_gpu_blocks=6, max_num_batched_tokens=8, max_num_seqs=3)
    columns = play(workload, engine).timeline
    assert columns.output_tokens.sum() == 32


# ── The prefix cache ──


@pytest.mark.parametrize("trace_block_size", [16, 24, 64, 100])
@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
def test_without_limits_hits_are_what_a_plain_trie_finds(block_size: int, trace_block_size: int) -> None:
    workload = conversations(
        12,
        arrivals=Poisson(qps=0.01),
        prefixes=SharedRatio(groups=2, ratio=0.6),
        trace_block_size=trace_block_size,
    )
    engine = VllmConfig(block_size=block_size, num_gpu_blocks=200_000 // block_size, timing=ONE_MS)
    columns = run_offline(workload, engine, workers=2, load=ClosedLoop(concurrency=1)).timeline
    order = np.argsort(columns.arrival_ns, kind="stable").tolist()
    expected = hits_one_after_another(workload, order, columns.worker.tolist(), block_size)
    assert columns.cached_tokens_first.tolist() == expected
    assert sum(expected) > 0


def test_many_random_workloads_hit_what_a_plain_trie_finds() -> None:
    found = 0
    for seed in range(60):
        workload = random_case(seed).workload
        engine = VllmConfig(block_size=[1, 3, 4, 16][seed % 4], num_gpu_blocks=100_000, timing=ONE_MS)
        columns = run_offline(workload, engine, workers=1 + seed % 3, load=ClosedLoop(concurrency=1)).timeline
        order = np.argsort(columns.first_admit_ns, kind="stable").tolist()
        expected = hits_one_after_another(workload, order, columns.worker.tolist(), engine.block_size)
        assert columns.cached_tokens_first.tolist() == expected, seed
        found += sum(expected)
    assert found > 0


def test_a_follow_up_hits_the_blocks_that_its_answer_was_generated_into() -> None:
    turns = [(64, 64, 0.0), (160, 8, 0.0)]
    engine = VllmConfig(block_size=16, timing=ONE_MS)
    quoted = play(sessions(turns, quoted=True), engine).timeline
    assert quoted.cached_tokens_first.tolist() == [0, 112]  # 127 of 128 tokens were computed: seven blocks
    unquoted = play(sessions(turns, quoted=False), engine).timeline
    assert unquoted.cached_tokens_first.tolist() == [0, 64]


def test_only_full_blocks_of_the_engine_are_found() -> None:
    workload = single_turns([600, 600], arrival_ms=[0, 500], content=[[1, 2], [1, 2]], trace_block_size=512)
    assert play(workload, VllmConfig(block_size=64)).timeline.cached_tokens_first.tolist() == [0, 576]


def test_a_prompt_that_differs_inside_a_trace_block_s_neighbour_shares_what_lies_before() -> None:
    # Engine blocks of 48 over trace blocks of 16: the second prompt differs from token 96 on.
    workload = single_turns([160, 160], arrival_ms=[0, 500], content=[range(10), [*range(6), 90, 91, 92, 93]])
    assert play(workload, VllmConfig(block_size=48)).timeline.cached_tokens_first.tolist() == [0, 96]
    assert play(workload, VllmConfig(block_size=64)).timeline.cached_tokens_first.tolist() == [0, 64]


def test_exact_output_tokens_are_what_later_prompts_can_hit() -> None:
    # With ids of one token each, the second prompt is the first and the tokens that it is known to have generated.
    prompt = list(range(16))
    answer = list(range(100, 117))
    workload = single_turns(
        [16, 40],
        [17, 1],
        arrival_ms=[0, 100],
        content=[prompt, [*prompt, *answer, *range(200, 207)]],
        trace_block_size=1,
        output_token_offsets=[0, 17, 17],
        output_token_ids=answer,
    )
    columns = play(workload, VllmConfig(block_size=16, timing=ONE_MS)).timeline
    assert columns.cached_tokens_first.tolist() == [0, 32]


def test_no_prefix_caching_means_no_hits_and_nothing_stored() -> None:
    workload = single_turns([64] * 3, arrival_ms=[0, 10, 20], content=[range(4)] * 3)
    columns = play(workload, VllmConfig(block_size=16, enable_prefix_caching=False)).timeline
    assert columns.cached_tokens_total.sum() == 0
    assert (columns.stored_blocks, columns.evictions) == (0, 0)


# ── Conservation ──


@pytest.mark.parametrize("part", range(3))
def test_every_step_of_a_random_run_keeps_the_books(part: int) -> None:
    for seed in range(part, 90, 3):
        case = random_case(seed)
        try:
            columns = run_offline(case.workload, case.config, check=True, **case.how).timeline
        except WrongState as error:
            assert "no progress" in str(error)
            continue
        served = columns.status == Status.COMPLETED
        assert (served | (columns.status == Status.REJECTED)).all()
        limit = case.config.max_model_len or 2**31 - 1
        asked = np.minimum(columns.requested_output_tokens, limit - columns.prompt_tokens)
        assert columns.output_tokens[served].tolist() == asked[served].tolist()
        assert columns.output_tokens[~served].sum() == 0
        # When a worker has drained, nothing is active: its last sample says so.
        for worker in range(columns.num_workers):
            own = np.flatnonzero(columns.sample_worker == worker)
            if len(own) and columns.sample_running[own[-1]] == 0 and columns.sample_waiting[own[-1]] == 0:
                assert columns.sample_used_blocks[own[-1]] == 0


# ── Progress ──


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_progress_rises_to_the_number_of_requests(routing: Any) -> None:
    counts: list[int] = []
    workload = single_turns([16] * 2000, arrival_ms=[row / 10 for row in range(2000)])
    run_offline(workload, VllmConfig(timing=ONE_MS), workers=2, routing=routing, progress=counts.append)
    assert len(counts) > 3
    assert counts == sorted(counts)
    assert 2000 - 256 <= counts[-1] <= 2000


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_an_error_in_the_progress_hook_stops_the_run(routing: Any) -> None:
    class Enough(Exception):
        pass

    calls = 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        raise Enough

    workload = single_turns([16] * 2000, arrival_ms=[row / 10 for row in range(2000)])
    with pytest.raises(Enough):
        run_offline(workload, VllmConfig(timing=ONE_MS), routing=routing, progress=stop)
    assert calls == 1


def test_system_prompts_are_computed_once_a_worker() -> None:
    workload = crowd(20, prefixes=SystemPrompts(groups=1, tokens=128), prompt_tokens=Normal(mean=64, std=0))
    columns = run_offline(workload, VllmConfig(block_size=64), workers=2).timeline
    assert columns.cached_tokens_first.tolist() == [0, 0, *[128] * 18]
