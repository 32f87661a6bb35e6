"""Replays on the stages of a pipeline, recomputed from the times of the stages by a second implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from model.physical_timing import Step, step_ms
from replay.building import MS, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.on_gpu import place_on_gpu
from understudy.run.run_plan import RunPlan
from understudy.tiers.gpu import GpuSettings

if TYPE_CHECKING:
    from understudy.timing.coefficients import StepCoefficients

GPU = GpuSettings(
    name="H100", tensor_parallel_size=2, pipeline_parallel_size=3, weight_dtype="fp8", front_end_ms=0.0
)


def place(
    *, asynchronous: bool, model: str = "Llama-3.1-70B"
) -> tuple[VllmConfig, tuple[StepCoefficients, ...]]:
    """The engine of a model on three stages, and the coefficients of each."""
    engine = VllmConfig(block_size=16, max_num_batched_tokens=1024, async_scheduling=asynchronous)
    placed = place_on_gpu(model, GPU, engine, None).engine
    assert isinstance(placed, VllmConfig)
    return placed, placed.timing.stages  # type: ignore[union-attr]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Qwen3-235B-A22B"])
def test_a_lone_request_takes_the_sum_of_all_stages(model: str, *, asynchronous: bool) -> None:
    engine, stages = place(asynchronous=asynchronous, model=model)
    run = run_offline(RunPlan(single_turns([700], [5]), engine))
    steps = [Step(chunks=[(700, 0)]), *(Step(contexts=[700 + place]) for place in range(1, 5))]
    expected = sum(step_ms(stage, step) for step in steps for stage in stages)
    assert run.timeline.last_token_ns.tolist() == pytest.approx([expected * MS], abs=20)


def test_chunks_leave_the_pipeline_at_the_pace_of_the_slowest_stage() -> None:
    engine, stages = place(asynchronous=False)
    run = run_offline(RunPlan(single_turns([4096], [1]), engine))
    free = [0.0] * len(stages)
    for chunk in range(4):
        now = 0.0
        for number, stage in enumerate(stages):
            now = max(now, free[number]) + step_ms(stage, Step(chunks=[(1024, 1024 * chunk)]))
            free[number] = now
    assert run.timeline.last_token_ns.tolist() == pytest.approx([free[-1] * MS], abs=20)


def test_requests_of_three_batches_keep_three_stages_busy() -> None:
    engine, stages = place(asynchronous=True)
    three = run_offline(RunPlan(single_turns([1024] * 3, [200] * 3), engine)).timeline
    alone = run_offline(RunPlan(single_turns([1024], [200]), engine)).timeline
    assert max(three.last_token_ns) < 1.05 * max(alone.last_token_ns)
    first = msgspec.structs.replace(engine, max_num_batched_tokens=4096)  # all three in one batch
    together = run_offline(RunPlan(single_turns([1024] * 3, [200] * 3), first)).timeline
    one = sum(step_ms(stage, Step(contexts=[1100] * 3)) for stage in stages)
    gaps = (max(together.last_token_ns) - max(together.first_token_ns)) / 199 / MS
    assert gaps == pytest.approx(one, rel=0.02)
