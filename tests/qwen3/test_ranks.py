"""Two processes, one manager: the tokens are those of one."""

from __future__ import annotations

import os
import signal

import pytest

from qwen3.building import CPU, OPEN, TINY, engine_of, generate, manager_of, prompt_of
from understudy.errors import ConfigError, WrongState
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Step
from understudy.qwen3.ranks import RankedExecutor, RankFailed, RankSettings
from understudy.qwen3.request import Request
from understudy.qwen3.scheduler import Scheduler, SchedulerConfig
from understudy.qwen3.weights import random_weights


def test_two_ranks_answer_as_one_and_one_that_dies_fails_the_step_for_all() -> None:
    """One test, because starting processes takes long."""
    prompts = [prompt_of(seed, 9 + 8 * seed) for seed in range(3)]
    manager = manager_of(TINY, 64)
    executor = RankedExecutor(RankSettings(TINY, 2, 4, 64, random_weights=7, deadline_s=60))
    engine = Engine(Scheduler(manager, SchedulerConfig(24, 8, 512)), executor)
    try:
        assert generate(engine, *prompts) == generate(
            engine_of(weights=random_weights(TINY, 7, CPU)), *prompts
        )
        engine.submit(Request("a", prompts[0], 50))
        engine.submit(Request("b", prompts[1], 50))
        for _ in range(3):
            engine.step()
        victim = executor._processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        outputs = engine.run()
        assert {o.request_id: o.finish_reason for o in outputs if o.finish_reason} == {
            "a": "error",
            "b": "error",
        }
        with pytest.raises(WrongState, match="build the engine anew"):
            executor.begin(Step())
        assert manager.available_blocks == manager.total_blocks - 1
    finally:
        engine.close()
        OPEN.remove(manager)
    assert all(process.exitcode is not None for process in executor._processes)


def test_what_does_not_divide_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        RankedExecutor(RankSettings(TINY, 3, 4, 64, random_weights=7))


def test_a_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(RankFailed, match=r"model.safetensors is missing"):
        RankedExecutor(RankSettings(TINY, 1, 4, 64, folder="/nonexistent"))
