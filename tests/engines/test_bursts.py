"""Speculative bursts: the sampler, what a step with a draft reserves and gives back, and what a replay shows of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engines.building import MS, engine_for, request_spec, submit_spec
from replay.building import ONE_MS, crowd, play, single_turns
from understudy import _core
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.report import Report
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop

# ── The sampler ──


@pytest.mark.parametrize(("rates", "tokens"), [([0, 1], 1), ([1, 1], 3), ([1, 0, 1], 2)])
def test_a_burst_ends_with_the_first_draft_token_that_is_not_accepted(
    rates: list[float], tokens: int
) -> None:
    sampler = _core.BurstSampler(rates, 42)
    assert {sampler.draw(10) for _ in range(1000)} == {tokens}


@pytest.mark.parametrize("remaining", [2, 1, 0])
def test_a_burst_is_never_longer_than_what_remains(remaining: int) -> None:
    sampler = _core.BurstSampler([1, 1], 42)
    assert {sampler.draw(remaining) for _ in range(100)} == {remaining}


def test_a_seed_is_a_stream() -> None:
    streams = []
    for seed in (42, 42, 43):
        sampler = _core.BurstSampler([0.8, 0.6, 0.4], seed)
        streams.append([sampler.draw(10) for _ in range(100)])
    assert streams[0] == streams[1] != streams[2]


def test_the_mean_length_is_what_the_rates_say() -> None:
    sampler = _core.BurstSampler([0.7, 0.5, 0.2], 42)
    mean = sum(sampler.draw(10) for _ in range(200_000)) / 200_000
    assert mean == pytest.approx(1 + 0.7 + 0.35 + 0.07, abs=0.01)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, 1.1])
def test_the_sampler_refuses_what_is_no_probability(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"accept_rates\[1\] must be in \[0, 1\]"):
        _core.BurstSampler([0.5, rate], 1)


# ── Settings ──


@pytest.mark.parametrize("nextn", [1, 2, 3, 4, 5])
def test_one_to_five_draft_tokens(nextn: int) -> None:
    assert len(MockerSettings(aic_nextn=nextn).accept_rates) == nextn


@pytest.mark.parametrize(
    ("given", "normalised", "rates"),
    [
        (None, "0.85,0.3,0", [0.85, 0.3, 0]),
        ("1,0.5", "1,0.5,0", [1, 0.5, 0]),
        (" 1, 0.5 ,0.25,0.125,0", "1,0.5,0.25", [1, 0.5, 0.25]),
        ("0.123456789", "0.123456789,0,0", [0.123456789, 0, 0]),
    ],
)
def test_accept_rates_are_padded_or_cut_to_the_draft(
    given: str | None, normalised: str, rates: list[float]
) -> None:
    config = MockerSettings(aic_nextn=3, aic_nextn_accept_rates=given)
    assert (config.aic_nextn_accept_rates, config.accept_rates) == (normalised, rates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aic_nextn": 0}, "aic_nextn must be from 1 to 5 draft tokens, got 0"),
        ({"aic_nextn": 6}, "aic_nextn must be from 1 to 5 draft tokens, got 6"),
        ({"aic_nextn_accept_rates": "0.5"}, "aic_nextn_accept_rates needs aic_nextn"),
        *(
            ({"aic_nextn": 1, "aic_nextn_accept_rates": f"0.5,{rate}"}, r"aic_nextn_accept_rates\[1\]")
            for rate in ("nan", "inf", "-0.1", "1.1", "often", "")
        ),
        ({"aic_nextn": 1, "decode_speedup_ratio": 2.0}, "decode_speedup_ratio contradicts aic_nextn"),
        ({"aic_nextn": 1, "async_scheduling": True}, "async_scheduling contradicts aic_nextn"),
        ({"aic_mtp_seed": -1}, "aic_mtp_seed must be in"),
        ({"aic_mtp_seed": 2**64}, "aic_mtp_seed must be in"),
    ],
)
def test_settings_of_speculation_that_make_no_sense_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmConfig.from_dict(settings)


def test_the_core_refuses_bursts_under_asynchronous_scheduling() -> None:
    config = _core.VllmEngineConfig(async_scheduling=True, mocker=_core.MockerSettings(accept_rates=[0.5]))
    with pytest.raises(ConfigError, match="async_scheduling"):
        _core.VllmEngine(config, _core.constant_timing(1, 1))


# ── The engine ──

TWO: dict[str, Any] = {"aic_nextn": 2, "aic_nextn_accept_rates": "1,1"}


def step(engine: _core.VllmEngine) -> _core.Effects:
    engine.begin_step(engine.now_ns)
    effects = engine.end_step(engine.now_ns)
    engine.check()
    return effects


@pytest.mark.parametrize(("speculation", "cached"), [({}, 8), (TWO, 4)])
def test_with_speculation_the_last_block_of_a_hit_is_computed_again(
    speculation: dict[str, Any], cached: int
) -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 100, **speculation})
    submit_spec(engine, request_spec("first", [[1, 8]], 1), 0, 4)
    step(engine)
    submit_spec(engine, request_spec("second", [[1, 12]], 1), 1, 4)
    step(engine)
    assert engine.admitted == [(1, False, cached)]


@pytest.mark.parametrize(("speculation", "needed"), [({}, 1), (TWO, 3)])
def test_with_speculation_an_admission_needs_more_free_blocks(
    speculation: dict[str, Any], needed: int
) -> None:
    # `holder` has the hits of `second` in use, so that only what is free counts: one block for its last four tokens;
    # with speculation another that is computed again, and one for the burst.
    for free, admitted in ((needed - 1, False), (needed, True)):
        blocks = 1 + 3 + free
        engine = engine_for(
            {"block_size": 4, "num_blocks": blocks, "scheduler_reserve_full_isl": False, **speculation}
        )
        if speculation:
            submit_spec(engine, request_spec("holder", [[1, 8]], 4), 0, 4)
        else:
            submit_spec(engine, request_spec("holder", [[1, 9]], 4), 0, 4)
        engine.begin_step(0)
        assert engine.free_blocks == free
        submit_spec(engine, request_spec("second", [[1, 12]], 3), 1, 4)
        engine.end_step(MS)
        # The holder's burst ends it here at the earliest, so look at what the second finds while it is held.
        engine.begin_step(MS)
        assert bool(engine.admitted) is admitted, free


def test_bursts_come_in_running_order_and_are_clipped_where_the_output_ends() -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 100, **TWO})
    short = submit_spec(engine, request_spec("short", [[1, 8]], 5), 0, 4)
    long = submit_spec(engine, request_spec("long", [[100, 8]], 8), 1, 4)
    step(engine)
    assert (engine.emitted(short), engine.emitted(long)) == (3, 3)
    (record,) = step(engine).finished
    assert (record.id, record.output_tokens, engine.emitted(long)) == (short, 5, 6)
    assert (engine.burst_steps, engine.burst_tokens) == (4, 11)
    (record,) = step(engine).finished
    assert (record.id, record.output_tokens) == (long, 8)


@pytest.mark.parametrize("rates", ["0", "1,1,1,1,1"])
def test_what_a_burst_reserved_and_did_not_need_is_free_after_the_step(rates: str) -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 11, "aic_nextn": 5, "aic_nextn_accept_rates": rates})
    submit_spec(engine, request_spec("a", [[1, 8]], 20), 0, 4)
    engine.begin_step(0)
    assert engine.free_blocks == 10 - 4  # 8 tokens, and up to 6 more
    engine.end_step(MS)
    engine.check()
    # 8 tokens and, of six that were accepted, the five that the step computed.
    assert engine.free_blocks == 10 - (2 if rates == "0" else 4)


def test_accepted_tokens_fill_blocks_that_others_find() -> None:
    engine = engine_for(
        {"block_size": 4, "num_blocks": 100, "aic_nextn": 5, "aic_nextn_accept_rates": "1,1,1,1,1"}
    )
    submit_spec(engine, request_spec("a", [[1, 3]], 6), 0, 4)
    step(engine)
    stored = engine.take_all_events()
    assert stored.kinds.tolist() == [0, 0]  # 3 and 5 of 6 tokens are computed
    assert engine.free_blocks == 99


def test_a_burst_ends_at_the_context_window() -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 100, "max_model_len": 10, **TWO})
    a = submit_spec(engine, request_spec("a", [[1, 8]], 50), 0, 4, 10)
    (record,) = step(engine).finished
    assert (record.id, record.output_tokens) == (a, 2)


def test_a_request_without_output_draws_no_burst() -> None:
    run = play(
        single_turns([8, 8], [0, 3]), VllmConfig(block_size=4, timing=ONE_MS, mocker=MockerSettings(**TWO))
    )
    assert run.timeline.output_tokens.tolist() == [0, 3]
    assert (run.timeline.burst_steps, run.timeline.burst_tokens) == (1, 3)


def test_a_request_fits_only_with_room_for_its_last_burst() -> None:
    config = VllmConfig(block_size=4, num_gpu_blocks=3, mocker=MockerSettings(aic_nextn=1), timing=ONE_MS)
    run = play(single_turns([8, 8], [4, 5]), config)
    assert run.timeline.output_tokens.tolist() == [4, 0]
    assert run.timeline.reject_reasons[1] == (
        "prompt and output of 13 tokens need 4 blocks of 4, num_gpu_blocks=3"
    )


# ── The replay ──


def test_tokens_of_a_burst_are_visible_together() -> None:
    columns = play(
        single_turns([8, 8], [7, 1]), VllmConfig(timing=ONE_MS, mocker=MockerSettings(**TWO))
    ).timeline
    assert columns.first_token_ns.tolist() == [MS, MS]
    assert columns.second_token_ns.tolist() == [MS, -1]
    assert columns.last_token_ns.tolist() == [3 * MS, MS]
    assert (columns.itl_ns.tolist(), columns.itl_count.tolist()) == ([0, MS], [4, 2])
    report = Report.build(columns)
    assert report.ttst_ms.mean == 0
    assert report.itl_ms.count == 6
    assert report.tpot_ms.mean == pytest.approx(2 / 6)
    assert report.accept_length == 8 / 4


def test_the_second_token_comes_a_step_later_when_the_first_burst_is_one_token() -> None:
    config = VllmConfig(timing=ONE_MS, mocker=MockerSettings(aic_nextn=1, aic_nextn_accept_rates="0"))
    columns = play(single_turns([8], [3]), config).timeline
    assert (columns.first_token_ns[0], columns.second_token_ns[0]) == (MS, 2 * MS)


def test_a_step_takes_as_long_as_without_speculation() -> None:
    class Asked:
        def __init__(self) -> None:
            self.batches: list[tuple[int, int]] = []

        def prefill_ms(self, *_: int) -> float:
            return 1.0

        def decode_ms(self, requests: int, context_tokens: int, *_: int) -> float:
            self.batches.append((requests, context_tokens))
            return 1.0

    asked = Asked()
    run_offline(
        RunPlan(single_turns([10, 20], [3, 5]), VllmConfig(mocker=MockerSettings(**TWO)), timing=asked)
    )
    assert asked.batches == [(2, 30), (1, 23)]


def test_acceptance_makes_decoding_faster_by_its_mean() -> None:
    workload = single_turns([16], [4000])
    config = VllmConfig(timing=ONE_MS, mocker=MockerSettings(aic_nextn=2, aic_nextn_accept_rates="0.7,0.5"))
    columns = run_offline(RunPlan(workload, config)).timeline
    assert columns.steps == pytest.approx(4000 / 2.05, rel=0.05)


SPECULATIVE = VllmConfig(block_size=16, num_gpu_blocks=60, max_num_seqs=8, mocker=MockerSettings(aic_nextn=3))


def test_runs_agree_whether_they_fast_forward_or_step_and_however_many_threads_play() -> None:
    workload = crowd(120)
    digests = {
        run_offline(
            RunPlan(workload, SPECULATIVE, workers=3, fast_forward=fast_forward, threads=threads, check=check)
        ).facts.digest
        for fast_forward, threads, check in [
            (True, 1, False),
            (False, 1, False),
            (True, 2, False),
            (True, 3, True),
        ]
    }
    assert len(digests) == 1
    columns = run_offline(RunPlan(workload, SPECULATIVE, workers=3)).timeline
    assert columns.preemptions.sum() > 0
    assert columns.burst_tokens == columns.output_tokens.sum()


def test_another_seed_is_another_run() -> None:
    workload = crowd(60)
    drafts = [MockerSettings(aic_nextn=3, aic_mtp_seed=seed) for seed in (1, 1, 2)]
    runs = [run_offline(RunPlan(workload, VllmConfig(block_size=16, mocker=mocker))) for mocker in drafts]
    assert runs[0].facts.digest == runs[1].facts.digest != runs[2].facts.digest


def test_workers_draw_from_streams_of_their_own() -> None:
    workload = single_turns([16, 16], [500, 500])
    config = VllmConfig(timing=ONE_MS, mocker=MockerSettings(aic_nextn=2, aic_nextn_accept_rates="0.5,0.5"))
    columns = run_offline(RunPlan(workload, config, workers=2, load=ClosedLoop(concurrency=2))).timeline
    assert columns.last_token_ns[0] != columns.last_token_ns[1]
    # Worker 1 draws as worker 0 does with the next seed.
    next_seed = MockerSettings(aic_nextn=2, aic_nextn_accept_rates="0.5,0.5", aic_mtp_seed=43)
    shifted = VllmConfig(timing=ONE_MS, mocker=next_seed)
    alone = run_offline(RunPlan(workload.take(np.array([1])), shifted)).timeline
    assert alone.last_token_ns[0] == columns.last_token_ns[1]
