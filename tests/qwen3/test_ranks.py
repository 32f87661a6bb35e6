"""Two processes, one manager: the tokens are those of one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qwen3.building import CPU, TINY, engine_of, folder_of, generate, prompt_of
from understudy.errors import ConfigError, WrongState
from understudy.kv import KvCacheManager
from understudy.qwen3 import EngineOptions, build_engine
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Step
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.ranks import RankedExecutor, RankFailed, RankSettings
from understudy.qwen3.request import Request
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.weights import random_weights
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path


def options(**more: Any) -> EngineOptions:
    return EngineOptions(
        device="cpu",
        page_size=4,
        num_blocks=64,
        max_num_seqs=8,
        max_batched_tokens=24,
        random_weights=7,
        **more,
    )


def test_two_ranks_answer_as_one_and_one_that_dies_fails_the_step_for_all(tmp_path: Path) -> None:
    """One test, because starting processes takes long."""
    prompts = [prompt_of(seed, 9 + 8 * seed) for seed in range(3)]
    engine = build_engine(folder_of(TINY, tmp_path), options(tensor_parallel_size=2))
    manager, executor = engine.scheduler.manager, engine.executor
    assert isinstance(executor, RankedExecutor)
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
        with pytest.raises(WrongState, match="build a new engine"):
            executor.begin(Step())
        assert manager.available_blocks == manager.total_blocks - 1
    finally:
        engine.close()
    assert all(process.exitcode is not None for process in executor._processes)


def test_what_does_not_divide_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        RankedExecutor(RankSettings(TINY, 3, options()))


def test_a_rank_that_cannot_start_says_why() -> None:
    with pytest.raises(RankFailed, match=r"model.safetensors is missing"):
        RankedExecutor(RankSettings(TINY, 1, replace(options(), random_weights=None), folder="/nonexistent"))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"tensor_parallel_size": 2, "tiers": TiersConfig()}, "tiers need tensor_parallel_size=1"),
        ({"tensor_parallel_size": 3}, "does not divide num_heads=4"),
    ],
)
def test_ranks_that_cannot_be_are_refused(more: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word):
        build_engine(folder_of(TINY, tmp_path), options(**more))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs CUDA")
@pytest.mark.parametrize("graphs", [False, True])
def test_a_rank_on_a_gpu_sums_through_nccl_and_answers_as_an_engine_without_ranks(
    tmp_path: Path, graphs: bool
) -> None:
    """As many ranks as there are GPUs of up to two; sized by the device's memory, with sums inside of graphs or not."""
    ranks = min(2, torch.cuda.device_count())
    gc.collect()
    torch.cuda.empty_cache()  # of tests before it
    how = replace(options(), device="cuda", num_blocks=None, memory_utilization=0.3, cuda_graphs=graphs)
    prompts = [prompt_of(seed, 9 + 8 * seed) for seed in range(3)]
    executor = RankedExecutor(RankSettings(TINY, ranks, how))
    assert executor.num_blocks > 64
    with KvCacheManager(executor.num_blocks, TINY.layout(4)) as manager:
        engine = Engine(Scheduler(manager, SchedulerConfig(24, 8, 512)), executor)
        answers = generate(engine, *prompts)
        assert generate(engine, *prompts) == answers  # warm
        executor.close()
    single = build_engine(folder_of(TINY, tmp_path), replace(how, num_blocks=64, cuda_graphs=False))
    assert answers == generate(single, *prompts)
    single.close()


class Answering:
    """The other end of a pipe, whose messages are there already."""

    def __init__(self, *told: object) -> None:
        self.ours, self.theirs = multiprocessing.Pipe()
        for message in told:
            self.theirs.send(message)


def ranked(*ends: Answering, deadline_s: float = 0.05) -> RankedExecutor:
    executor = RankedExecutor.__new__(RankedExecutor)
    executor.settings = RankSettings(TINY, len(ends), options(deadline_s=deadline_s))
    executor._pipes, executor._processes, executor._broken = [end.ours for end in ends], [], ""
    return executor


def test_a_rank_that_says_it_is_still_at_it_is_waited_for_and_one_that_is_silent_is_not() -> None:
    """Capturing every graph takes longer than a step may."""
    ends = [Answering(None, None, 7), Answering(5)]
    assert ranked(*ends)._answers("did not start") == [7, 5]
    ends = [Answering(7), Answering(None, None)]
    with pytest.raises(RankFailed, match=r"rank 1 did not start within 0\.05 s"):
        ranked(*ends)._answers("did not start")


def test_every_manager_of_a_size_pads_with_the_same_block() -> None:
    """Ranks capture graphs before they have heard of the manager."""
    for layout in (TINY.layout(4), TINY.layout(4).shard(2)):
        manager = KvCacheManager(20, layout, prefix_caching=False, events=True)
        with manager as one, KvCacheManager(20, layout) as other:
            assert one.padding_block == other.padding_block
