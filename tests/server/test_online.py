"""Online replay: the same report as offline, from live workers over HTTP."""

from __future__ import annotations

from dataclasses import replace

from replay.building import sessions, single_turns
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.online import prompt_of, replay_online, run_online
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import FinishReason, Status

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=256, timing=Constant(prefill_ms=4.0, decode_ms=2.0))


def test_counts_are_those_of_the_workload_and_times_follow_each_other() -> None:
    workload = single_turns(
        [40, 60, 40, 80],
        [5, 1, 9, 3],
        [0, 10, 20, 300],
        [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3], [9, 8, 7, 6, 5]],
    )
    run = run_online(workload, ENGINE, workers=1, clock_speed=4)
    timeline = run.timeline  # its constructor has checked that it is consistent
    assert timeline.output_tokens.tolist() == [5, 1, 9, 3]
    assert set(timeline.status.tolist()) == {Status.COMPLETED}
    assert timeline.cached_tokens_first.tolist()[3] == 0
    assert timeline.cached_tokens_first.tolist()[1] >= 32
    assert timeline.stored_blocks > 0
    assert run.facts.lateness_ms["token_p99"] >= 0
    assert timeline.arrival_ns[3] >= 300e6  # never before it is due


def test_requests_end_by_eos_or_at_their_limit_as_offline() -> None:
    workload = single_turns([40, 40, 40], [5, 9, 7], [0, 10, 20], max_tokens=[20, 6, -1])
    online = run_online(workload, ENGINE, clock_speed=4).timeline
    offline = run_offline(RunPlan(workload, ENGINE)).timeline
    assert online.output_tokens.tolist() == offline.output_tokens.tolist() == [5, 6, 7]
    assert online.finish_reason.tolist() == offline.finish_reason.tolist()
    assert online.finish_reason.tolist() == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]


def test_sglang_engines_do_online_what_they_do_offline() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=256, timing=Constant(prefill_ms=4.0, decode_ms=2.0))
    workload = sessions([(32, 40, 0), (96, 4, 20), (128, 4, 20)], quoted=True)
    online = run_online(workload, engine, clock_speed=4).timeline
    offline = run_offline(RunPlan(workload, engine)).timeline
    assert online.output_tokens.tolist() == offline.output_tokens.tolist() == [40, 4, 4]
    assert online.cached_tokens_first.tolist() == offline.cached_tokens_first.tolist() == [0, 64, 96]


def test_sessions_go_on_when_the_turn_before_has_ended() -> None:
    workload = sessions([(32, 4, 0), (64, 4, 20)], [(16, 2, 0)])
    report = replay_online(workload, "two sessions", ENGINE, workers=2, routing="least_loaded", clock_speed=4)
    timeline = report.columns
    first, second = (row for row in range(3) if timeline.session[row] == timeline.session[0])
    assert timeline.arrival_ns[second] >= timeline.finish_ns[first] + 20e6
    assert report.requests.completed == 3


def test_notes_on_the_trace_are_in_the_report() -> None:
    workload = replace(single_turns([40], [2], [0]), notes=("lengths are approximate",))
    report = replay_online(workload, "noted", ENGINE, clock_speed=4)
    assert report.run.notes == ("lengths are approximate",)


def test_a_turn_finds_the_answer_that_it_quotes_as_offline() -> None:
    workload = sessions([(32, 40, 0), (96, 4, 20), (128, 4, 20)], quoted=True)
    online = run_online(workload, ENGINE, clock_speed=4).timeline
    offline = run_offline(RunPlan(workload, ENGINE)).timeline
    assert offline.cached_tokens_first.tolist() == [0, 64, 96]
    assert online.cached_tokens_first.tolist() == offline.cached_tokens_first.tolist()


def test_equal_content_is_equal_tokens_and_nothing_else_is() -> None:
    workload = single_turns([48, 48, 50], content=[[1, 2, 3], [1, 2, 9], [1, 2, 3, 4]])
    one, two, three = (prompt_of(workload, row).tolist() for row in range(3))
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
    assert one == three[:48]
    assert len(three) == 50
