"""Shapes of models: parameters as their makers count them, and configs that do not add up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.tiers.model_shape import MODELS as KV_SHAPES
from understudy.timing.architecture import Architecture
from understudy.timing.find_architecture import find_architecture
from understudy.timing.known_models import MODELS

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
}
GPT_OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 36,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}

LLAMA_4: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "torch_dtype": "bfloat16",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "vocab_size": 202048,
    },
}


def read(folder: Path, **config: Any) -> Architecture:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return find_architecture(str(path))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.1-70B", 70.55),
        ("Llama-3.1-405B", 405.85),
        ("Llama-2-70B", 68.98),
        ("CodeLlama-34B", 33.74),
        ("Qwen2.5-7B", 7.62),
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-32B", 32.76),
        ("Mistral-Small-24B", 23.57),
        ("Yi-34B", 34.39),
        ("Phi-4", 14.66),
        ("Mixtral-8x7B", 46.70),
        ("Mixtral-8x22B", 140.6),
        ("Qwen3-30B-A3B", 30.53),
        ("Qwen3-235B-A22B", 235.1),
        ("gpt-oss-120b", 116.8),
        ("gpt-oss-20b", 20.9),
        ("MiniMax-M2.5", 228.7),
        ("Gemma-3-27B", 27.0),
        ("Llama-4-Scout-17B-16E", 107.8),
        ("Llama-4-Maverick-17B-128E", 400.7),
        ("DeepSeek-V3", 671.0),
        ("Kimi-K2.5", 1026.4),
        ("Mistral-Large-3-675B", 673),
        ("GLM-5", 744),
        ("GLM-4.7-Flash", 30),
        ("Qwen3.5-397B-A17B", 397),
        ("Qwen3.5-122B-A10B", 122),
        ("Qwen3.5-27B", 27),
        ("Gemma-4-31B", 30.7),
        ("Gemma-4-26B-A4B", 25.2),
        ("Nemotron-3-Nano-30B-A3B", 31.6),
        ("Nemotron-3-Super-120B-A12B", 120.6),
    ],
)
def test_a_model_has_the_parameters_that_its_makers_count(model: str, billions: float) -> None:
    shape = MODELS[model]
    bf16 = Architecture(
        **{name: getattr(shape, name) for name in shape.__struct_fields__}
        | {"weights": "bf16", "dense_weights": None}
    )
    assert bf16.weight_bytes() / 2e9 == pytest.approx(billions, rel=0.005)


def test_every_model_whose_kv_bytes_are_known_has_step_times() -> None:
    for name in KV_SHAPES:
        assert find_architecture(name) is MODELS[name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "Llama-3.1-70B"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "Llama-3.3-70B"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("MiniMaxAI/MiniMax-M2.5", "MiniMax-M2.5"),
        ("llama8b", "Llama-3.1-8B"),
        ("llama2-70b", "Llama-2-70B"),
        ("llama2-7b", "Llama-2-7B"),
        ("mixtral7b", "Mixtral-8x7B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("codellama-34b", "CodeLlama-34B"),
        ("scout-17b-16e", "Llama-4-Scout-17B-16E"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Llama-3.1-70B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "Qwen2.5-32B"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen3-8B"),
        ("Qwen/QwQ-32B", "Qwen2.5-32B"),
        ("lmsys/vicuna-7b-v1.5", "Llama-2-7B"),
        ("microsoft/Phi-3-mini-128k-instruct", "Phi-3-mini"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "Mistral-Small-24B"),
        ("amd/gpt-oss-120b-w-mxfp4-a-fp8", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "DeepSeek-V3.1"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("moonshotai/Kimi-K2-Thinking", "Kimi-K2-Thinking"),
        ("nvidia/Kimi-K2.5-NVFP4", "Kimi-K2.5"),
        ("zai-org/GLM-5-FP8", "GLM-5"),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", "Mistral-Large-3-675B"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Nemotron-3-Nano-30B-A3B"),
        ("google/gemma-4-31B-it", "Gemma-4-31B"),
    ],
)
def test_a_model_is_found_by_the_names_that_people_use(name: str, found: str) -> None:
    assert find_architecture(name).name == found


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "bf16"),
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "fp8"),
        ("amd/Llama-3.1-70B-Instruct-FP8-KV", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "nvfp4"),
        ("nvidia/MiniMax-M2.5-NVFP4", "nvfp4"),
        ("MiniMaxAI/MiniMax-M2.5", "fp8"),
        ("openai/gpt-oss-120b", "mxfp4"),
        ("nvidia/gpt-oss-120b-FP4", "mxfp4"),
        ("unsloth/gpt-oss-20b-BF16", "bf16"),
    ],
)
def test_a_name_that_tells_the_type_of_the_weights_is_believed(name: str, weights: str) -> None:
    assert find_architecture(name).weights == weights


def test_a_name_that_tells_a_type_without_timing_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight type 'w8a16' is not known"):
        find_architecture("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16")


def test_a_config_says_the_same_as_the_table(tmp_path: Path) -> None:
    known = {**dict.fromkeys(("name",), ""), "weights": "bf16", "dense_weights": None}
    for config, model in (
        (LLAMA_8B, "Llama-3.1-8B"),
        (QWEN3_MOE, "Qwen3-30B-A3B"),
        (GPT_OSS, "gpt-oss-120b"),
    ):
        found, wanted = read(tmp_path, **config), MODELS[model]
        for field in found.__struct_fields__:
            if field not in known:
                assert getattr(found, field) == getattr(wanted, field), field


@pytest.mark.parametrize(
    ("experts", "every", "model"),
    [(16, 1, "Llama-4-Scout-17B-16E"), (128, 2, "Llama-4-Maverick-17B-128E")],
)
def test_llama_4_has_a_shared_expert_that_its_config_does_not_name(
    tmp_path: Path, experts: int, every: int, model: str
) -> None:
    text = {**LLAMA_4["text_config"], "num_local_experts": experts, "interleave_moe_layer_step": every}
    found, wanted = read(tmp_path, **{**LLAMA_4, "text_config": text}), MODELS[model]
    for field in found.__struct_fields__:
        if field not in ("name", "weights", "dense_weights"):
            assert getattr(found, field) == getattr(wanted, field), field


def test_a_kind_of_model_that_is_built_like_others_is_read(tmp_path: Path) -> None:
    for kind in ("llama", "qwen3", "mistral"):
        assert read(tmp_path, **LLAMA_8B, model_type=kind).num_layers == 32
    seeing = {"model_type": "gemma3", "text_config": {**LLAMA_8B, "model_type": "gemma3_text"}}
    assert read(tmp_path, **seeing).hidden_size == 4096


def test_the_type_of_the_weights_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, **LLAMA_8B).weights == "bf16"
    assert read(tmp_path, **LLAMA_8B, quantization_config={"quant_method": "fp8"}).weights == "fp8"
    assert read(tmp_path, **LLAMA_8B, quantization_config={"quant_method": "awq"}).weights == "int4"
    oss = read(tmp_path, **GPT_OSS)
    assert (oss.weights, oss.linear_type(None)) == ("mxfp4", "bf16")
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method 'bitnet' is not known"):
        read(tmp_path, **LLAMA_8B, quantization_config={"quant_method": "bitnet"})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab_size": ...}, r"config\.json: vocab_size is missing"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an int of at least 1"),
        ({"num_attention_heads": 30}, "hidden_size=4096 is not a multiple of num_attention_heads=30"),
        ({"num_key_value_heads": 7}, "num_attention_heads=32 is not a multiple of num_key_value_heads=7"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "qk_nope_head_dim is missing"),
        ({"layer_types": ["linear_attention"] * 32}, "only layers of full or sliding attention"),
        ({"index_head_dim": 128}, "index_head_dim: sparse attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 9}, "layer_types has 1 entries"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "experts_per_token=9 exceeds num_experts=8"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"model_type": "opt"}, r"config\.json: model_type 'opt' is not known.*give a copy of the file"),
        ({"model_type": "bert"}, "model_type 'bert' is not known"),
        ({"model_type": "deepseek_v32"}, "sparse attention"),
        ({"hidden_size": "wide"}, "hidden_size must be an int"),
        ({"sliding_window": 4096, "max_window_layers": -1}, "max_window_layers must be an int"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 0},
            "expert_size must be an int",
        ),
    ],
)
def test_a_config_with_missing_or_contradictory_shapes_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, **{**LLAMA_8B, **change})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nvidia/DeepSeek-V3.2-NVFP4", "sparse attention"),
        ("deepseek-ai/DeepSeek-V4-Pro", "compressed and sparse attention"),
        ("zai-org/GLM-5.2-FP8", "indexers that layers share"),
        ("moonshotai/Kimi-K3", "Kimi delta attention"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "Kimi delta attention"),
        ("XiaomiMiMo/MiMo-V2-Flash", "windows with heads of their own"),
        ("google/gemma-4-E4B-it", "embeddings and MLPs by layer"),
    ],
)
def test_a_model_without_step_times_is_refused_by_its_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*, which is not timed; give measured times instead"):
        find_architecture(name)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'Nobody-7B' is neither a known name"):
        find_architecture("Nobody-7B")


@pytest.mark.parametrize("model", ["DeepSeek-V4", "deepseek-ai/DeepSeek-V4-Pro"])
def test_a_model_without_times_is_refused_by_its_reason_where_layers_are_wanted_too(model: str) -> None:
    with pytest.raises(
        ConfigError, match="compressed and sparse attention, which is not timed, and its layers"
    ):
        layers_of_model(model)
