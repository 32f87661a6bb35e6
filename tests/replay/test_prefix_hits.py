"""What a prompt finds in the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest

from model.replay_gen import random_case
from model.unlimited_cache import hits_one_after_another
from replay.building import ONE_MS, conversations, crowd, play, sessions, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop, Normal, Poisson, SharedRatio, SystemPrompts


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
    columns = run_offline(RunPlan(workload, engine, workers=2, load=ClosedLoop(concurrency=1))).timeline
    order = np.argsort(columns.arrival_ns, kind="stable").tolist()
    expected = hits_one_after_another(workload, order, columns.worker.tolist(), block_size)
    assert columns.cached_tokens_first.tolist() == expected
    assert sum(expected) > 0


def test_many_random_workloads_hit_what_a_plain_trie_finds() -> None:
    found = 0
    for seed in range(60):
        workload = random_case(seed).workload
        engine = VllmConfig(block_size=[1, 3, 4, 16][seed % 4], num_gpu_blocks=100_000, timing=ONE_MS)
        columns = run_offline(
            RunPlan(workload, engine, workers=1 + seed % 3, load=ClosedLoop(concurrency=1))
        ).timeline
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


def test_system_prompts_are_computed_once_a_worker() -> None:
    workload = crowd(20, prefixes=SystemPrompts(groups=1, tokens=128), prompt_tokens=Normal(mean=64, std=0))
    columns = run_offline(RunPlan(workload, VllmConfig(block_size=64), workers=2)).timeline
    assert columns.cached_tokens_first.tolist() == [0, 0, *[128] * 18]
