"""Stages of a pipeline: their coefficients, weights and blocks, recomputed from the model's sizes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.fleet_size import size_group
from understudy.run.stages import join_stages
from understudy.tiers.gpu import GpuSettings
from understudy.timing.capacity import kv_blocks
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.pipeline import stage_coefficients
from understudy.timing.presets import preset

LIMITS: dict[str, Any] = {
    "block_size": 16,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "gpu_memory_utilization": 0.92,
}


def deployed(name: str, gpu: str = "H100", weights: str = "fp8", **parallel: Any) -> Deployment:
    """A model on stages."""
    return Deployment(
        model=find_architecture(name), gpu=find_gpu(gpu), weights=weights, parallel=Parallelism(**parallel)
    )


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "DeepSeek-R1", "Qwen3-235B-A22B", "GLM-5"])
def test_stages_have_the_layers_head_and_overheads_of_the_model(name: str) -> None:
    one = deployed(name, "H200", tensor=8, pipeline=4)
    model, parallel = one.model, one.parallel
    reached = preset(model, one.gpu, one.weights, one.kv).efficiencies
    whole, stages = one.coefficients(reached), stage_coefficients(one, reached)
    parts = [model.num_layers // 4] * 4
    for place in range(model.num_layers % 4):
        parts[2 - place] += 1
    assert [stage.weights_ms / whole.weights_ms for stage in stages] == pytest.approx(
        [part / model.num_layers for part in parts]
    )
    for field in ("token_ms", "expert_ms", "expert_token_ms", "context_ms", "attention_ms", "history_ms"):
        assert sum(getattr(stage, field) for stage in stages) == pytest.approx(getattr(whole, field)), field
    assert [bool(stage.head_ms) for stage in stages] == [False, False, False, True]
    assert stages[-1].head_sequence_ms == whole.head_sequence_ms
    links_us = sum(stage.comm_ms for stage in stages) * 1e3 - whole.comm_ms * 1e3
    assert links_us == pytest.approx(3 * reached.link_latency_us)
    sent = 2 * 2 * model.hidden_size / parallel.tensor  # hidden states and residual, in 16 bits
    moved = sum(stage.comm_token_ms for stage in stages) - whole.comm_token_ms
    assert moved == pytest.approx(3 * sent * 1e3 / (one.gpu.link_gbps * 1e9 * reached.link))
    assert sum(stage.step_ms for stage in stages) == pytest.approx(whole.step_ms + 3 * reached.step_ms)
    assert [stage.prefill_ms for stage in stages] == [whole.prefill_ms] * 4


def test_a_slow_link_between_stages_takes_its_time() -> None:
    fast, slow = (
        deployed("Llama-3.1-70B", tensor=2, pipeline=2, stage_link_gbps=gbps) for gbps in (None, 45.0)
    )
    reached = preset(fast.model, fast.gpu, fast.weights, fast.kv).efficiencies
    sent = [stage_coefficients(one, reached)[1].comm_token_ms for one in (fast, slow)]
    within = stage_coefficients(fast, reached)[0].comm_token_ms
    assert sent[1] - within == pytest.approx(10 * (sent[0] - within))


def test_weights_of_stages_are_those_of_the_model() -> None:
    one = deployed("Llama-3.1-70B", tensor=2, pipeline=4)
    per_gpu = one.stage_weight_bytes
    assert sum(per_gpu) * 2 == pytest.approx(one.model.weight_bytes("fp8"), rel=1e-6)
    assert one.weight_bytes_per_gpu == max(per_gpu)
    ends = 128256 * 8192 * 2 / 2
    assert [each - per_gpu[1] for each in per_gpu] == pytest.approx([ends, 0, 0, ends], abs=2)


def test_blocks_are_those_of_the_stage_with_the_least_room() -> None:
    one = deployed("Llama-3.1-70B", tensor=2, pipeline=2)
    spent = [each + 8192 * (4 * 28672 / 2 + 8 * 8192) * 2 + 0.6e9 for each in one.stage_weight_bytes]
    spent[1] += 256 * 128256 * 8  # the logits of the last stage
    bytes_per_block = 16 * 40 * 2 * 4 * 128 * 2  # of 40 layers with four KV heads on the GPU
    usable = 0.92 * one.gpu.memory_gb * 1e9
    assert kv_blocks(one, **LIMITS) == min(int((usable - each) // bytes_per_block) - 1 for each in spent)
    whole = msgspec.structs.replace(one, parallel=Parallelism(tensor=2))
    assert kv_blocks(one, **LIMITS) > 2 * kv_blocks(whole, **LIMITS)


def test_a_pipeline_is_counted_in_gpus() -> None:
    gpu = GpuSettings(name="H100", tensor_parallel_size=4, pipeline_parallel_size=2)
    size = size_group(3, VllmConfig(), gpu)
    assert (size.engine_gpus, size.gpus, size.workers) == (8, 24, 3)
    assert size_group(1, VllmConfig(pipeline_parallel_size=2), None).gpus == 2


def test_engine_and_gpus_have_the_same_number_of_stages() -> None:
    two = GpuSettings(name="H100", pipeline_parallel_size=2)
    assert join_stages(VllmConfig(), two)[0].pipeline_parallel_size == 2
    assert join_stages(VllmConfig(pipeline_parallel_size=2), GpuSettings(name="H100"))[1] == two
    with pytest.raises(ConfigError, match=r"contradicts gpu\.pipeline_parallel_size=2"):
        join_stages(VllmConfig(pipeline_parallel_size=3), two)
    with pytest.raises(ConfigError, match="pipelines of SGLang are not simulated"):
        join_stages(SglangConfig(), two)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"name": "H100", "stage_link_gbps": 50.0}, "stage_link_gbps is for the stages of a pipeline"),
        (
            {"name": "H100", "pipeline_parallel_size": 2, "aiconfigurator": True},
            "aiconfigurator have no times of stages",
        ),
        ({"memory": "80GiB", "weights": "16GB", "pipeline_parallel_size": 2}, "affects step times"),
    ],
)
def test_gpus_without_times_of_stages_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        GpuSettings(**given)


def test_ranks_that_share_experts_have_no_stages() -> None:
    with pytest.raises(ConfigError, match="stages of data-parallel ranks that share"):
        deployed("Qwen3-235B-A22B", tensor=1, data=8, pipeline=2)
    with pytest.raises(ConfigError, match="KV cache groups of stages are not planned"):
        GpuSettings(name="H200", pipeline_parallel_size=2).groups("gpt-oss-120b", None, max_model_len=4096)


def test_the_source_of_times_says_that_stages_were_never_measured() -> None:
    gpu = GpuSettings(name="H100", tensor_parallel_size=2, pipeline_parallel_size=2, weight_dtype="fp8")
    timing = gpu.timing("Llama-3.1-70B", None)
    said = timing.describe_origin()
    assert "on 4 x H100, uncalibrated: 2 stages of a pipeline, whose times were never measured" in said
    assert said.endswith("no error is known of a pipeline")
    assert "range TPOT" not in said
