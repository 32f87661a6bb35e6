"""Numbers belong to an engine, a GPU, a type and a model; what was not measured has those of its neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest

from understudy._core import StepLoad
from understudy.report.measured import find_unmeasured
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.expert_kernels import find_expert_kernel
from understudy.timing.find_architecture import find_architecture
from understudy.timing.fitted_factors import Target, apply_factors, find_deployment, read_fitted
from understudy.timing.gpus import GPUS, find_gpu
from understudy.timing.presets import preset
from understudy.timing.weight_types import WEIGHT_TYPES

R1 = find_architecture("DeepSeek-R1")
LLAMA = find_architecture("Llama-3.1-8B")


def test_an_engine_that_was_measured_with_a_model_on_a_gpu_is_named() -> None:
    found = preset(R1, find_gpu("B200"), "fp8", "fp8", engine="sglang")
    assert found.trust == "fitted"
    assert "of DeepSeek-R1 in fp8 on B200, measured with SGLang" in found.origin


def test_an_engine_that_was_never_measured_on_a_gpu_is_named_too() -> None:
    for gpu in ("H100", "A100"):
        found = preset(LLAMA, find_gpu(gpu), "bf16", "bf16", engine="sglang")
        assert found.trust == "uncalibrated"
        assert f"SGLang was never measured on {gpu}" in found.origin
        assert "measured with SGLang" not in found.origin


def test_a_neighbour_of_measured_deployments_says_which_they_are() -> None:
    found = preset(find_architecture("Kimi-K2.5"), find_gpu("B200"), "nvfp4", "fp8", engine="sglang")
    assert found.trust == "uncalibrated"
    assert "not measured with SGLang on B200, where DeepSeek-R1, GLM-5, Qwen3.5-397B-A17B was" in found.origin


def test_a_gpu_with_a_data_sheet_is_measured_where_a_deployment_on_it_was() -> None:
    minimax = find_architecture("MiniMax-M2.5")
    assert preset(minimax, find_gpu("B300"), "fp8", "fp8").trust == "fitted"
    other = preset(LLAMA, find_gpu("B300"), "bf16", "bf16")
    assert other.origin.startswith("B300 was never measured: ")


def test_engines_are_comparable_where_both_were_measured() -> None:
    def source(engine: str, gpu: str) -> str:
        found = preset(R1, find_gpu(gpu), "fp8", "fp8", engine=engine)
        return f"preset: DeepSeek-R1 in fp8 (KV fp8) on {gpu}, {found.trust}: {found.origin}"

    here = [[("vllm", source("vllm", "B200"))], [("sglang", source("sglang", "B200"))]]
    assert find_unmeasured(here) is None
    there = [[("vllm", source("vllm", "H100"))], [("sglang", source("sglang", "H100"))]]
    assert "the times of SGLang were measured with vLLM" in str(find_unmeasured(there))


def test_factors_name_efficiencies_and_multiply_them() -> None:
    fitted = read_fitted()
    names = {name for one in fitted.factors for name in one.factors}
    assert names <= set(Efficiencies.__struct_fields__)
    assert all(0.2 < value < 20 for one in fitted.factors for value in one.factors.values())
    target = Target(engine="trtllm", gpu="H200", model="none", weights="fp8", has_experts=False)
    start = Efficiencies(weights=0.1, compute=0.1, kv=0.1, link=0.1)
    factor = math.prod(one.factors.get("step_ms", 1.0) for one in fitted.factors if one.holds_for(target))
    assert apply_factors(start, target).step_ms == pytest.approx(start.step_ms * factor, rel=1e-3)
    for one in fitted.deployments:
        own = Target(engine=one.engine, gpu=one.gpu, model=one.model, weights=one.weights, has_experts=True)
        assert find_deployment(own) == one


def test_every_gpu_has_kernels_of_every_type() -> None:
    for gpu in (*GPUS, "data sheet"):
        for kind in WEIGHT_TYPES:
            found = find_expert_kernel(gpu, kind)
            assert 0 < found.read <= 1
            assert 0 < found.compute <= 1
            assert found.origin


@pytest.mark.parametrize("tokens", [1, 4, 32, 512])
def test_expert_groups_wait_for_the_busiest_one_as_random_routing_has_it(tokens: int) -> None:
    draw = np.random.default_rng(0)
    experts, groups, chosen = 256, 8, 8
    most = []
    for _ in range(200):
        used = np.zeros(experts, dtype=bool)
        for _ in range(tokens):
            used[draw.choice(experts, chosen, replace=False)] = True
        most.append(used.reshape(groups, -1).sum(axis=1).max())
    spread = Deployment(
        model=R1, gpu=find_gpu("H200"), weights="fp8", parallel=Parallelism(tensor=8, expert=8)
    ).coefficients(Efficiencies(weights=0.8, compute=0.5, kv=0.8, expert_imbalance=1.0))
    plain = StepCoefficients(
        expert_ms=1.0,
        local_experts=experts / groups,
        expert_share=chosen / experts,
        expert_spread=spread.expert_spread,
        captures=(),
    )
    found = plain.build().step_ms(StepLoad(decodes=tokens))
    assert found == pytest.approx(float(np.mean(most)), rel=0.2)


def test_overlap_of_degree_three_is_the_root_of_the_sum_of_cubes() -> None:
    for reading, computing in ((3.0, 0.0), (3.0, 4.0), (1.0, 1.0), (0.0, 2.0), (5.0, 1e-3)):
        one = StepCoefficients(weights_ms=reading, token_ms=computing, captures=(), softness=3.0)
        expected = (reading**3 + computing**3) ** (1 / 3)
        assert one.build().step_ms(StepLoad(decodes=1)) == pytest.approx(expected, rel=1e-14)
