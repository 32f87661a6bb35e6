"""Requests that can never run, and runs that come to nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replay.building import MS, ONE_MS, play, sessions, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop, OpenLoop

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
        vllm_version="0.30",  # later, a request that is alone is not cut
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
        run_offline(RunPlan(workload, engine, routing=routing))
    assert "12 of 12 blocks are free" in str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_requests_that_preempt_each_other_for_ever_end_with_an_error(
    routing: Any, asynchronous: bool
) -> None:
    # The oldest gives way: two long prompts in small chunks, neither of which fits beside the other.
    workload = single_turns([60, 60, 60], 8)
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=17,
        long_prefill_token_threshold=4,
        preemption_mode="fifo",
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
        async_scheduling=asynchronous,
        timing=ONE_MS,
    )
    said = set()
    for fast_forward in (True, False):
        with pytest.raises(WrongState, match="preempt each other without end") as caught:
            run_offline(RunPlan(workload, engine, routing=routing, fast_forward=fast_forward))
        said.add(str(caught.value))
    # Told as of when that was clear, and not as of when somebody looked.
    assert len(said) == 1
    assert "; 8 of 17 blocks are free" in said.pop()
    newest = msgspec.structs.replace(engine, preemption_mode="lifo")
    assert run_offline(RunPlan(workload, newest, routing=routing)).timeline.completed.all()


@pytest.mark.parametrize("load", [OpenLoop(), ClosedLoop(20)], ids=["alone", "together"])
def test_a_halt_tells_the_blocks_that_were_free_when_it_was_clear(load: OpenLoop | ClosedLoop) -> None:
    # Of an offload that loads for one what another then has to give back: all are free when the last step has ended.
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=12,
        max_num_batched_tokens=512,
        long_prefill_token_threshold=6,
        scheduler_reserve_full_isl=False,
        async_scheduling=True,
        vllm_version="0.29",
        timing=ONE_MS,
    )
    host = {"tier": "g2", "blocks": 10, "link": {"down_gbps": 0.001, "up_gbps": 0.0001}}
    tiers = TiersConfig.from_dict({"kv_bytes_per_token": 1000, "tiers": [host], "offload": {"mode": "vllm"}})
    for fast_forward in (True, False):
        with pytest.raises(WrongState, match="; 0 of 12 blocks are free"):
            run_offline(
                RunPlan(
                    single_turns([112, 20], 60), engine, load=load, tiers=tiers, fast_forward=fast_forward
                )
            )


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
    run = run_offline(RunPlan(workload, engine, routing=routing))
    assert run.timeline.completed.all()
    assert run.timeline.preemptions.tolist() == [1, 0]
