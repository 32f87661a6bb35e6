"""Offline replay: one deterministic order of everything that happens, whatever the way of playing it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import understudy
from model.replay_gen import COLUMNS, random_case
from replay.building import MS, ONE_MS, conversations, crowd, play, sessions, single_turns
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, WrongState
from understudy.report.series import worker_means
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.workload import ClosedLoop, OpenLoop, Workload


def assert_same_columns(one: OfflineRun, other: OfflineRun, *, but: tuple[str, ...] = ()) -> None:
    for name in COLUMNS:
        if name not in but:
            np.testing.assert_array_equal(getattr(one.timeline, name), getattr(other.timeline, name), name)


# ── One deterministic order ──


def test_twenty_runs_have_one_digest() -> None:
    workload = conversations()
    runs = [run_offline(RunPlan(workload, workers=3, routing="random", seed=7)) for _ in range(20)]
    assert len({run.facts.digest for run in runs}) == 1


@pytest.mark.parametrize("routing", ["round_robin", "random"])
def test_any_number_of_threads_gives_the_same_run(routing: Any) -> None:
    workload = crowd()
    engine = VllmConfig(block_size=16, num_gpu_blocks=100)
    runs = [
        run_offline(RunPlan(workload, engine, workers=5, routing=routing, seed=3, threads=threads))
        for threads in (1, 2, 3, 16)
    ]
    assert len({run.facts.digest for run in runs}) == 1
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
            alone = run_offline(RunPlan(case.workload, case.config, **how))
        except WrongState:
            with pytest.raises(WrongState, match="no progress"):
                run_offline(RunPlan(case.workload, case.config, **{**how, "routing": "least_loaded"}))
            continue
        together = run_offline(RunPlan(case.workload, case.config, **{**how, "routing": "least_loaded"}))
        assert_same_columns(alone, together)
        assert alone.facts.digest == together.facts.digest
        compared += 1
    assert compared > 40


def test_several_workers_fare_alike_in_both_ways_of_playing() -> None:
    # A second turn far away makes the workers meet, and changes nothing for the others.
    workload = crowd(40)
    rows = len(workload)
    last = int(workload.arrival_ns[-1])
    columns: dict[str, Any] = {
        "arrival_ns": [*workload.arrival_ns, last, last],
        "prompt_tokens": [*workload.prompt_tokens, 1, 1],
        "output_tokens": [*workload.output_tokens, 1, 1],
        "hash_offsets": [*workload.hash_offsets, *(int(workload.hash_offsets[-1]) + i for i in (1, 2))],
        "hash_ids": [*workload.hash_ids, 10**6, 10**6 + 1],
        "session": [*workload.session, rows, rows],
        "turn": [0] * (rows + 1) + [1],
        "delay_ns": [0] * (rows + 1) + [3600 * 1000 * MS],
    }
    joined = Workload(**columns, trace_block_size=workload.trace_block_size)
    engine = VllmConfig(block_size=16, num_gpu_blocks=90, max_num_seqs=4)
    together = run_offline(RunPlan(joined, engine, workers=3)).timeline
    alone = run_offline(RunPlan(joined.take(range(rows + 1)), engine, workers=3)).timeline
    for name in (
        "queued_ns",
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
    plain = run_offline(RunPlan(workload, engine, workers=2))
    checked = run_offline(RunPlan(workload, engine, workers=2, check=True))
    assert plain.facts.digest == checked.facts.digest


def test_everything_that_happens_to_a_request_is_in_the_digest() -> None:
    workload = crowd(10)
    base = run_offline(RunPlan(workload, workers=2)).facts.digest
    assert run_offline(RunPlan(workload, workers=1)).facts.digest != base
    faster = VllmConfig(mocker=MockerSettings(speedup_ratio=1.0001))
    assert run_offline(RunPlan(workload, faster, workers=2)).facts.digest != base
    assert (
        run_offline(RunPlan(workload, VllmConfig(enable_prefix_caching=False), workers=2)).facts.digest
        != base
    )


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
        run_offline(RunPlan(workload, workers=2, threads=2, **how))
    assert run_offline(RunPlan(workload, workers=2, threads=1, **how)).timeline.completed.all()


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
    run = run_offline(RunPlan(workload, VllmConfig(num_gpu_blocks=64), workers=1000))
    assert np.bincount(run.timeline.worker).tolist() == [3] * 1000
    assert run.timeline.completed.all()
    together = run_offline(
        RunPlan(workload, VllmConfig(num_gpu_blocks=64), workers=1000, routing="least_loaded")
    )
    assert together.timeline.completed.all()


# ── Conservation ──


@pytest.mark.parametrize("part", range(3))
def test_every_step_of_a_random_run_keeps_the_books(part: int) -> None:
    for seed in range(part, 90, 3):
        case = random_case(seed)
        try:
            columns = run_offline(RunPlan(case.workload, case.config, check=True, **case.how)).timeline
        except WrongState:  # no progress: another test's business
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


# ── Usage over time ──


def test_a_request_counts_in_the_usage_from_its_first_step_on() -> None:
    timing = Constant(prefill_ms=10, decode_ms=5)
    run = run_offline(
        RunPlan(
            single_turns([32, 32], 1, [0, 30]), VllmConfig(block_size=16, num_gpu_blocks=8, timing=timing)
        )
    )
    assert run.timeline.sample_time_ns.tolist() == [0, 15 * MS, 30 * MS, 45 * MS]
    assert run.timeline.sample_running.tolist() == [1, 0, 1, 0]
    assert run.timeline.sample_used_blocks.tolist() == [2, 0, 2, 0]
    assert run.timeline.sample_cached_blocks.tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_worker_that_idles_most_of_a_long_run_has_little_usage(fast_forward: bool) -> None:
    # 0.1 s of work every 1.7 s, more often than there are samples
    count = 6000
    workload = single_turns([16] * count, 100, [1700 * row for row in range(count)])
    config = VllmConfig(block_size=16, num_gpu_blocks=8, timing=ONE_MS)
    timeline = run_offline(RunPlan(workload, config, fast_forward=fast_forward)).timeline
    assert 1000 < len(timeline.sample_time_ns) <= 2048
    assert float(worker_means(timeline, timeline.sample_running)[0][0]) == pytest.approx(0.1 / 1.7, rel=0.15)


@pytest.mark.parametrize("name", ["engine", "load", "slo"])
def test_an_argument_of_another_kind_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        understudy.replay(crowd(2), **{name: 5})  # type: ignore[arg-type]
