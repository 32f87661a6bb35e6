"""The scheduler, as a replay shows it."""

from __future__ import annotations

from typing import Any

import pytest

from replay.building import MS, ONE_MS, play, single_turns
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan


def test_a_budget_is_spent_on_one_prompt_after_the_other() -> None:
    # Two prompts of 8 and a budget of 4: the first computes 4 and 4, the second waits meanwhile.
    budget: dict[str, Any] = {"max_num_batched_tokens": 4, "async_scheduling": False}
    engine = VllmConfig(block_size=4, num_gpu_blocks=100, timing=Constant(1.0, 1.0), **budget)
    columns = play(single_turns([8, 8], [1, 1]), engine).timeline
    assert columns.first_token_ns[0] == 3 * MS  # steps of 1 (prefill) and 2 (prefill and token) ms
    assert columns.first_admit_ns.tolist() == [0, 3 * MS]


def test_running_requests_take_the_budget_before_waiting_ones() -> None:
    budget: dict[str, Any] = {"max_num_batched_tokens": 4, "async_scheduling": False}
    engine = VllmConfig(block_size=4, num_gpu_blocks=100, timing=ONE_MS, **budget)
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
    columns = run_offline(RunPlan(workload, engine)).timeline
    assert columns.completed.all()
    assert (columns.output_tokens == 100).all()
    assert (columns.stored_blocks > 0) == caching


def test_identical_requests_under_pressure_all_get_their_tokens() -> None:
    workload = single_turns([8] * 8, 4, content=[range(2)] * 8, trace_block_size=4)
    engine = VllmConfig(block_size=4, num_gpu_blocks=6, max_num_batched_tokens=8, max_num_seqs=3)
    columns = play(workload, engine).timeline
    assert columns.output_tokens.sum() == 32
