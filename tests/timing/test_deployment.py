"""What a step costs a rank: numbers computed by hand, divisions that cannot be, and what must only grow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.physical_timing import Step, step_ms
from understudy.errors import ConfigError
from understudy.timing.capacity import kv_blocks, kv_memory
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.efficiencies import PEAKS, Efficiencies
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import GPUS, find_gpu, sheet_gpu
from understudy.timing.presets import preset
from understudy.timing.weight_types import kv_type, weight_type

ALL = Efficiencies(
    weights=1.0,
    compute=1.0,
    kv=1.0,
    attention=1.0,
    experts=1.0,
    expert_compute=1.0,
    link=1.0,
    link_latency_us=10.0,
    step_ms=1.0,
    layer_us=5.0,
    sequence_us=10.0,
    prefill_ms=1.5,
    floor_ms_per_layer=0.5,
)


def deployed(
    model: str, gpu: str = "H100", weights: str = "bf16", kv: str = "bf16", **parallel: int
) -> Deployment:
    return Deployment(
        model=find_architecture(model),
        gpu=find_gpu(gpu),
        weights=weights,
        kv=kv,
        parallel=Parallelism(**parallel),
    )


def test_a_dense_model_costs_what_its_bytes_and_products_say() -> None:
    c = deployed("Llama-3.1-70B", weights="fp8", kv="fp8", tensor=4).coefficients(ALL)
    layer = 8192 * 128 * 2 * (64 + 8) + 3 * 8192 * 28672  # 855,638,016 parameters
    assert c.weights_ms == pytest.approx(80 * layer / 4 / 3350e9 * 1e3)
    assert c.token_ms == pytest.approx(2 * 80 * layer / 4 / 1979e12 * 1e3)
    assert c.head_ms == pytest.approx(128256 * 8192 * 2 / 4 / 3350e9 * 1e3)
    assert c.head_sequence_ms == pytest.approx(2 * 128256 * 8192 / 4 / 989e12 * 1e3)
    assert c.context_ms == pytest.approx(80 * 2 * 2 * 128 / 3350e9 * 1e3)
    assert c.attention_ms == pytest.approx(4 * 80 * 16 * 128 / 989e12 * 1e3)
    assert c.comm_ms == pytest.approx(160 * 0.010 * 1.3)
    assert c.comm_token_ms == pytest.approx(160 * 8192 * 2 * 1.5 / 450e9 * 1e3)
    assert (c.step_ms, c.sequence_ms, c.prefill_ms, c.floor_ms) == pytest.approx((1.4, 0.01, 1.5, 40))
    assert (c.local_experts * c.expert_ms, c.expert_share, c.window_context_ms) == (0, 0, 0)


def test_experts_are_cut_among_gpus_and_read_as_far_as_tokens_reach_them() -> None:
    c = deployed("Qwen3-30B-A3B", tensor=2).coefficients(ALL)
    expert = 3 * 2048 * 768
    assert c.local_experts * c.expert_ms == pytest.approx(48 * 128 * expert * 2 / 2 / 3350e9 * 1e3)
    assert c.expert_token_ms == pytest.approx(2 * 48 * 8 * expert / 2 / 989e12 * 1e3)
    assert c.expert_share == 8 / 128
    ranks = deployed("Qwen3-30B-A3B", data=2, expert=2).coefficients(ALL)
    assert ranks.local_experts * ranks.expert_ms == pytest.approx(c.local_experts * c.expert_ms)
    assert ranks.weights_ms == pytest.approx(2 * c.weights_ms)
    assert ranks.comm_token_ms == 0
    assert ranks.comm_rank_token_ms == pytest.approx(2 * 48 * 2048 * 2 / 2 / 450e9 * 1e3)
    assert ranks.expert_token_ms == pytest.approx(c.expert_token_ms)
    assert (ranks.expert_share, ranks.ranks) == (8 / 128, 2)


def test_sliding_layers_read_no_more_than_their_window() -> None:
    c = deployed("gpt-oss-120b", weights="mxfp4").coefficients(ALL)
    assert c.window == 128
    assert c.context_ms == c.window_context_ms == pytest.approx(18 * 2 * 8 * 64 * 2 / 3350e9 * 1e3)
    near, far = step_ms(c, Step(contexts=[128])), step_ms(c, Step(contexts=[1128]))
    assert far - near == pytest.approx(1000 * c.context_ms)


def test_the_weights_of_a_gpu_are_its_share_of_the_model() -> None:
    assert deployed("Llama-3.1-70B").weight_bytes_per_gpu == pytest.approx(141.1e9, rel=0.001)
    assert deployed("Llama-3.1-70B", tensor=8).weight_bytes_per_gpu == pytest.approx(17.64e9, rel=0.001)
    assert deployed("gpt-oss-120b", weights="mxfp4").weight_bytes_per_gpu == pytest.approx(65e9, rel=0.02)
    assert deployed("Llama-3.1-70B", kv="fp8", tensor=2).kv_bytes_per_token == 80 * 2 * 4 * 128


@pytest.mark.parametrize(
    ("model", "parallel", "match"),
    [
        (
            "Llama-3.1-70B",
            {"tensor": 3},
            "tensor_parallel_size=3 does not divide the 64 heads of Llama-3.1-70B",
        ),
        ("Phi-4", {"tensor": 8}, "tensor_parallel_size=8 does not fit the 10 KV heads of Phi-4"),
        ("Llama-3.1-8B", {"tensor": 2, "expert": 2}, "Llama-3.1-8B has no experts"),
        ("Mixtral-8x7B", {"tensor": 2, "expert": 4}, "expert_parallel_size=4 does not divide the 2 GPUs"),
        ("Mixtral-8x7B", {"data": 16, "expert": 16}, "does not divide the 8 experts of Mixtral-8x7B"),
        ("Llama-3.1-8B", {"tensor": 0}, "tensor_parallel_size must be an int of at least 1"),
    ],
)
def test_a_division_that_cannot_be_is_refused(model: str, parallel: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Parallelism(**parallel).check(find_architecture(model))


def test_types_have_the_names_that_engines_use_and_others_are_refused() -> None:
    assert weight_type("torch.bfloat16").name == "bf16"
    assert weight_type("AWQ").name == "int4"
    for name in ("FP8-Block", "float8_e4m3fn", "fp8_e5m2", "w8a8", "int8", "mxfp8"):
        assert weight_type(name).name == "fp8"
    assert kv_type("fp8_e4m3") == kv_type("fp8_inc") == kv_type("float8") == "fp8"
    assert kv_type("auto") == "bf16"
    with pytest.raises(ConfigError, match="weight type 'int3' is not known; known are bf16, fp8"):
        weight_type("int3")
    with pytest.raises(ConfigError, match="KV type 'int4' is not known"):
        kv_type("int4")


def test_gpus_are_found_by_usual_names_and_others_by_their_data_sheet() -> None:
    for name, wanted in {
        "h100_sxm": "H100",
        "NVIDIA H200": "H200",
        "b200_sxm": "B200",
        "A100-SXM4-80GB": "A100",
        "RTX4090": "RTX 4090",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
    }.items():
        assert find_gpu(name) is GPUS[wanted]
    for name in (
        "GH200 144GB",
        "H100 NVL",
        "A100-PCIE-40GB",
        "H20 141GB",
        "A10",
        "MI250X",
        "L40",
        "",
    ):  # others, or nobody's
        with pytest.raises(ConfigError, match=r"is not known; (nearest|known) are"):
            find_gpu(name)
    with pytest.raises(ConfigError, match=r"'MI250X' is not known.*--gpu-bandwidth-gbps"):
        find_gpu("MI250X")
    sheet = sheet_gpu(bandwidth_gbps=5300, tflops=1307, memory_gb=192)
    assert preset(find_architecture("Llama-3.1-8B"), sheet, "bf16", "bf16").trust == "uncalibrated"
    with pytest.raises(ConfigError, match="bandwidth_gbps must be a finite number above 0"):
        sheet_gpu(bandwidth_gbps=0, tflops=1, memory_gb=1)


def test_weights_in_a_type_that_the_gpu_cannot_multiply_compute_in_bf16() -> None:
    h100, b200, a100 = GPUS["H100"], GPUS["B200"], GPUS["A100"]
    assert (h100.tflops("fp4"), h100.tflops("fp8"), h100.tflops("bf16")) == (989, 1979, 989)
    assert (b200.tflops("fp4"), b200.tflops("fp8")) == (9000, 4500)
    assert a100.tflops("fp8") == a100.tflops("bf16") == 312


def test_a_preset_says_how_far_to_trust_it() -> None:
    llama, oss = find_architecture("Llama-3.1-70B"), find_architecture("gpt-oss-120b")
    assert preset(llama, GPUS["H100"], "fp8", "fp8").trust == "fitted"
    assert preset(llama, GPUS["A100"], "bf16", "bf16").trust == "rough"
    assert preset(llama, GPUS["L40S"], "bf16", "bf16").trust == "rough"
    assert preset(llama, GPUS["H100"], "int4", "bf16").trust == "uncalibrated"
    for gpu in ("H100", "H200", "B200"):  # in whole, whatever is known of its linear layers by themselves
        assert preset(oss, GPUS[gpu], "mxfp4", "bf16").trust == "fitted"
    qwen = preset(find_architecture("Qwen3-235B-A22B"), GPUS["H100"], "bf16", "bf16")
    assert qwen.trust == "uncalibrated"
    assert "Qwen3-235B-A22B" in qwen.origin
    fp8 = preset(llama, GPUS["H100"], "fp8", "fp8").efficiencies
    assert fp8.kv < preset(llama, GPUS["H100"], "fp8", "bf16").efficiencies.kv


def test_experts_are_known_by_their_shape_and_else_have_kernels_of_their_gpu_and_type() -> None:
    known = find_architecture("gpt-oss-120b")
    renamed = msgspec.structs.replace(known, name="ours")
    b200, h200 = find_gpu("B200"), find_gpu("H200")
    assert preset(renamed, b200, "mxfp4", "fp8") == preset(known, b200, "mxfp4", "fp8")
    small = preset(find_architecture("gpt-oss-20b"), b200, "mxfp4", "fp8")
    assert small.trust == "uncalibrated"
    assert "experts of gpt-oss-20b in mxfp4: activations in 8 bits" in small.origin
    glm = preset(find_architecture("GLM-4.5"), h200, "fp8", "bf16")
    assert "experts of GLM-4.5 in fp8: op tables of fp8 experts on H200" in glm.origin
    assert "not measured with vLLM on H200, where Llama-3.1-70B, gpt-oss-120b was" in glm.origin


def test_experts_may_be_otherwise_in_a_release_that_was_measured() -> None:
    minimax, b200 = find_architecture("MiniMax-M2.5"), find_gpu("B200")
    now = preset(minimax, b200, "fp8", "fp8")
    assert preset(minimax, b200, "fp8", "fp8", release="0.19.0") == now
    before = preset(minimax, b200, "fp8", "fp8", release="0.17.0")
    assert before.efficiencies.experts < now.efficiencies.experts
    assert before.efficiencies.link == now.efficiencies.link
    assert before.origin.endswith("InferenceX MiniMax-M2.5 on B200 with vLLM 0.17.0")
    assert before.trust == "fitted"


def test_no_number_of_experts_that_were_not_measured_exceeds_a_peak() -> None:
    for gpu in ("H100", "B300", "L40S", "RTX 4090"):
        for engine in ("vllm", "sglang", "trtllm"):
            scout = find_architecture("Llama-4-Scout-17B-16E")
            found = preset(scout, find_gpu(gpu), "fp8", "bf16", engine=engine).efficiencies
            assert max(getattr(found, name) for name in PEAKS) <= 1
    own = preset(find_architecture("MiniMax-M2.5"), find_gpu("H100"), "fp8", "bf16")
    assert own.efficiencies.experts > 1


def test_every_preset_times_every_model_that_fits_its_gpu() -> None:
    step = Step(contexts=[1000] * 8, chunks=[(600, 0)])
    for gpu in GPUS.values():
        for name in ("Llama-3.1-8B", "gpt-oss-20b", "Mixtral-8x7B"):
            model = find_architecture(name)
            reached = preset(model, gpu, model.weights, "bf16").efficiencies
            deployment = Deployment(
                model=model, gpu=gpu, weights=model.weights, parallel=Parallelism(tensor=2)
            )
            assert 1 < step_ms(deployment.coefficients(reached), step) < 1000


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights": 0.0}, "timing.weights must be a finite number above 0"),
        ({"step_ms": -1.0}, "timing.step_ms must be a finite number from 0"),
        ({"kv": float("nan")}, "timing.kv must be a finite number"),
    ],
)
def test_efficiencies_that_make_no_sense_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        msgspec.structs.replace(ALL, **change).__post_init__()
    with pytest.raises(ConfigError, match=match):
        Efficiencies(**{**msgspec.structs.asdict(ALL), **change})


def test_coefficients_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"timing\.context_ms must be a finite number from 0"):
        StepCoefficients(context_ms=-1.0)


@given(
    model=st.sampled_from(["Llama-3.1-8B", "gpt-oss-120b", "Mixtral-8x7B"]),
    contexts=st.lists(st.integers(1, 5000), max_size=40),
    chunks=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 3000)), max_size=3),
    others=st.integers(0, 50),
    more=st.sampled_from(["context", "decode", "chunk", "history", "longer", "others"]),
)
def test_a_step_with_more_in_it_takes_no_less(
    model: str, contexts: list[int], chunks: list[tuple[int, int]], others: int, more: str
) -> None:
    shape = find_architecture(model)
    c = deployed(model, weights=shape.weights, tensor=2).coefficients(
        preset(shape, GPUS["B200"], shape.weights, "bf16").efficiencies
    )
    before = Step(contexts, chunks, others)
    if more == "context" and contexts:
        after = Step([contexts[0] + 1, *contexts[1:]], chunks, others)
    elif more == "history" and chunks:
        after = Step(contexts, [(chunks[0][0], chunks[0][1] + 1), *chunks[1:]], others)
    elif more == "longer" and chunks:
        after = Step(contexts, [(chunks[0][0] + 1, chunks[0][1]), *chunks[1:]], others)
    elif more == "chunk":
        after = Step(contexts, [*chunks, (1, 0)], others)
    elif more == "others":
        after = Step(contexts, chunks, others + 1)
    else:
        after = Step([*contexts, 1], chunks, others)
    assert step_ms(c, after) >= step_ms(c, before) - 1e-12


def test_experts_in_mxfp4_take_the_memory_of_their_padded_kernels() -> None:
    """gpt-oss-120b on one H200 has 103,690 blocks by vLLM 0.22's log, and 64.4 GiB of weights on H100 by 0.14's."""
    oss = find_architecture("gpt-oss-120b")
    found = kv_blocks(
        Deployment(model=oss, gpu=find_gpu("H200"), weights="mxfp4"),
        block_size=16,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        gpu_memory_utilization=0.9,
    )
    assert found == pytest.approx(103_690, rel=0.05)
    spent = [
        kv_memory(
            Deployment(model=oss, gpu=find_gpu("H200"), weights=kind),
            max_num_batched_tokens=1,
            max_num_seqs=1,
            gpu_memory_utilization=0.9,
            overhead_bytes=0,
        ).spent
        for kind in ("mxfp4", "nvfp4")
    ]
    assert spent[0] == pytest.approx(64.4 * 2**30, rel=0.01)
    assert spent[0] > spent[1] > oss.weight_bytes("mxfp4")
