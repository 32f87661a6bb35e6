"""Step times of models with recurrent states: every sequence reads and writes its states once per step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import single_turns
from understudy._core import StepLoad
from understudy.api import replay
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers.gpu import GpuSettings
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu

if TYPE_CHECKING:
    from pathlib import Path

ALL = Efficiencies(weights=0.8, compute=0.5, kv=0.7)
NEXT = "Qwen3-Next-80B-A3B"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def coefficients(tensor: int = 1) -> dict[str, float]:
    deployed = Deployment(
        model=find_architecture(NEXT),
        gpu=find_gpu("H200"),
        weights="bf16",
        parallel=Parallelism(tensor=tensor),
    )
    found = deployed.coefficients(ALL)
    return {name: getattr(found, name) for name in ("context_ms", "attention_ms", "sequence_ms", "token_ms")}


def test_the_parameters_are_those_of_the_model() -> None:
    model = find_architecture(NEXT)
    assert model.weight_bytes() / 2 == pytest.approx(79.6e9, rel=0.01)
    active = model.linear_parameters + 48 * 10 * model.expert_parameters
    assert active == pytest.approx(3e9, rel=0.1)


def test_a_state_costs_bytes_per_sequence_and_no_context() -> None:
    model = find_architecture(NEXT)
    assert model.state_elements == 32 * 128 * 128 + 3 * 8192
    bare = Deployment(model=model, gpu=find_gpu("H200"), weights="bf16")
    bytes_per_token = 2 * 2 * 256 * 2 * 12  # keys and values of 2 heads of 256, 16 bits, 12 layers
    assert bare.kv_bytes_per_token == bytes_per_token
    one, two = coefficients(), coefficients(2)
    read_ms = 36 * model.state_elements * 2 * 2 / (find_gpu("H200").bandwidth_gbps * 1e6)
    assert one["sequence_ms"] - ALL.sequence_us / 1e3 == pytest.approx(read_ms / ALL.kv)
    assert two["sequence_ms"] < one["sequence_ms"]


def test_decode_steps_of_states_grow_with_sequences_as_those_of_full_attention_grow_with_context() -> None:
    timing = GpuSettings(name="H200", tensor_parallel_size=2).timing(NEXT, None).build()

    def step_ms(decodes: int, context: int) -> float:
        return timing.step_ms(StepLoad(decodes=decodes, context_tokens=context))

    near, far = step_ms(8, 8 * 1000), step_ms(8, 8 * 30000)
    full = GpuSettings(name="H200", tensor_parallel_size=2).timing("Qwen3-30B-A3B", None).build()
    grown = full.step_ms(StepLoad(decodes=8, context_tokens=8 * 30000)) - full.step_ms(
        StepLoad(decodes=8, context_tokens=8 * 1000)
    )
    assert 0 < far - near < grown / 3
    assert step_ms(64, 64 * 1000) > near


def test_a_config_file_of_the_architecture_gives_the_known_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert find_architecture(str(path)).shape == find_architecture(NEXT).shape


def test_other_states_still_need_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "llama", "mamba_d_state": 16}))
    with pytest.raises(ConfigError, match="give measured times instead"):
        find_architecture(str(path))


def test_a_replay_with_states_fast_forwards_to_the_same_times() -> None:
    settings = ReplaySettings.read(None, {}, [f"model={NEXT}", "gpu.name=B200", "engine.block_size=16"])
    assert isinstance(settings.engine, VllmConfig)
    assert {group.kind for group in settings.engine.kv_cache_groups} == {"mamba", "full"}
    load = single_turns([3000] * 6, 400)
    fast = run_offline(RunPlan(load, settings.engine))
    slow = run_offline(RunPlan(load, settings.engine, fast_forward=False))
    assert fast.facts.digest == slow.facts.digest
    assert replay(load, settings.engine).tpot_ms.mean > 0
