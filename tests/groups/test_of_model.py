"""Groups of known models and of config.json files, next to vLLM's derivations for the same layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.groups import groups_of_model, layers_of_model
from understudy.groups.known_layers import CONFIGS
from understudy.timing.known_models import MODELS

from .test_derivations import DERIVATIONS, INPUTS

if TYPE_CHECKING:
    from pathlib import Path

RECORDED = {entry["model"]: entry for entry in DERIVATIONS}
LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **config}))
    return str(folder)


def kinds(model: str) -> str:
    letters = {"full": "F", "sliding_window": "W", "chunked_local": "C", "mamba": "S", "mla": "L"}
    return "".join(letters[layer.kind] for layer in layers_of_model(model))


@pytest.mark.parametrize(
    ("model", "recorded", "settings"),
    [
        ("openai/gpt-oss-20b", "gpt-oss-20b", {}),
        ("google/gemma-3-12b-it", "gemma-3-12b", {}),
        ("google/gemma-2-27b-it", "gemma-2-27b", {}),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1 (all windows)", {}),
        ("mistralai/Ministral-8B-Instruct-2410", "ministral-8b (1 full, 3 window)", {}),
        (
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "llama-4-scout, tp 8, default (hybrid manager off)",
            {"tensor_parallel": 8},
        ),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b", {}),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3", {}),
        ("ai21labs/AI21-Jamba-1.5-Mini", "jamba-1.5-mini (4 full, 28 mamba1)", {}),
        ("ibm-granite/granite-4.0-h-tiny", "granite-4.0-h-tiny (4 full, 36 mamba2)", {}),
        ("ibm-ai-platform/Bamba-9B", "bamba-9b (3 full, 29 mamba2)", {}),
    ],
)
def test_a_known_model_has_the_groups_and_the_capacity_of_vllm(
    model: str, recorded: str, settings: dict[str, Any]
) -> None:
    entry = RECORDED[recorded]
    given = {name: entry[name] for name in INPUTS if name != "disable_hybrid"}
    plan = groups_of_model(model, **given, **settings)
    derived = {key: value for key, value in entry.items() if key not in (*INPUTS, "layers", "model")}
    assert plan.to_dict() == derived


def test_nemotron_h_has_the_recorded_sizes_with_16_bit_states() -> None:
    """Its file places attention at other layers than the derivation, so that indices differ."""
    entry = RECORDED["nemotron-h-8b (4 full, 24 mamba2)"]
    given = {name: entry[name] for name in INPUTS}
    found = groups_of_model("nvidia/Nemotron-H-8B-Base-8K", state_dtype="bfloat16", **given).to_dict()
    for group in (*found["groups"], *(groups := [dict(group) for group in entry["groups"]])):
        group["layers"] = len(group["layers"])
    assert found == {key: entry[key] for key in found} | {"groups": groups}
    assert kinds("Nemotron-H-8B") == "SSSSFSSSSSFSSSSSFSSSSSFSSSSS"
    wide = groups_of_model("Nemotron-H-8B", **given)
    assert wide.attention_block == 1040  # vLLM keeps its states in 32 bits


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("gpt-oss-20b", "WF" * 12),
        ("gpt-oss-120b", "WF" * 18),
        ("Gemma-2-9B", "WF" * 21),
        ("Gemma-3-4B", "WWWWWF" * 5 + "WWWW"),
        ("Gemma-3-27B", "WWWWWF" * 10 + "WW"),
        ("Llama-4-Maverick-17B-128E", "CCCF" * 12),
        ("Qwen3-Next-80B-A3B", "SSSF" * 12),
        ("Kimi-Linear-48B-A3B", "SSSL" * 6 + "SSL"),
        ("DeepSeek-V3.2", "LL" * 61),
        ("DeepSeek-R1", "L" * 61),
        ("Kimi-K2.5", "L" * 61),
        ("GLM-5", "LL" * 78),
        ("MiniMax-M3", "FFF" + "FL" * 57),
        ("Qwen3.5-397B-A17B", "SSSF" * 15),
        ("Gemma-4-31B", "WWWWWF" * 10),
        ("Nemotron-3-Nano-30B-A3B", "SSSF" + "SSSF" * 4 + "SSSSF" + "SSSS"),
        ("Llama-3.1-8B", "F" * 32),
        ("Mistral-7B-v0.3", "F" * 32),
    ],
)
def test_layers_of_a_known_model(model: str, pattern: str) -> None:
    assert kinds(model) == pattern


def test_every_known_model_gives_layers_with_the_windows_that_its_times_assume() -> None:
    for name, shape in MODELS.items():
        found = kinds(name)
        assert len(found) == shape.num_layers + (0 if shape.indexer is None else shape.indexer.layers)
        assert found.count("W") + found.count("C") == shape.window_layers
    for name in CONFIGS:
        assert kinds(name)


def test_mla_next_to_delta_attention_has_blocks_of_128_tokens_times_a_number() -> None:
    plan = groups_of_model("Kimi-Linear-48B-A3B", memory_bytes=30 << 30, max_model_len=131072)
    assert plan.attention_block == 1920
    assert [(group.kind, len(group.layers)) for group in plan.groups] == [
        ("mamba", 7),
        ("mamba", 7),
        ("mamba", 6),
        ("mla_attention", 7),
    ]


def test_sparse_mla_keeps_the_keys_of_its_indexer_in_the_same_group() -> None:
    layers = layers_of_model("DeepSeek-V3.2", kv_dtype="fp8")
    assert [layer.page_bytes for layer in layers[:2]] == [64 * 656, 64 * 132]
    assert layers_of_model("DeepSeek-V3.2")[0].page_bytes == 64 * 576 * 2
    plan = groups_of_model("DeepSeek-V3.2", memory_bytes=30 << 30, max_model_len=8192)
    assert [(group.uniform_type, len(group.layers)) for group in plan.groups] == [(True, 122)]


def test_llama_4_keeps_whole_contexts_unless_the_hybrid_manager_is_on() -> None:
    settings: dict[str, Any] = {"memory_bytes": 400 << 30, "max_model_len": 1 << 20, "tensor_parallel": 8}
    model = "Llama-4-Scout-17B-16E"
    assert len(groups_of_model(model, **settings).groups) == 1
    hybrid = groups_of_model(model, **settings, disable_hybrid=False)
    assert [group.kind for group in hybrid.groups] == ["chunked_local_attention"] * 3 + ["full_attention"]


def test_heads_and_states_are_divided_among_gpus_and_a_latent_is_not() -> None:
    assert layers_of_model("gpt-oss-20b", tensor_parallel=4)[0].kv_heads == 2
    assert layers_of_model("Qwen3-Next-80B-A3B", tensor_parallel=4)[3].kv_heads == 1
    assert layers_of_model("Qwen3-Next-80B-A3B", tensor_parallel=4)[0].shapes == ((3, 2048), (8, 128, 128))
    assert layers_of_model("Nemotron-H-8B", tensor_parallel=16)[0].shapes == ((3, 768), (8, 64, 128))
    assert layers_of_model("DeepSeek-V3", tensor_parallel=8)[0].head_size == 576


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({}, "FFFFFFFF"),
        ({"sliding_window": 4096}, "WWWWWWWW"),
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 4}, "FFFFFFFF"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4}, "FFFFWWWW"),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, "WWWFWWWF"),
        ({"sliding_window": 512, "model_type": "gemma3_text"}, "WWWWWFWW"),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 4}, "FWFWFWFW"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0, 1, 1, 0, 1]}, "CCCFCCFC"),
        ({"num_kv_shared_layers": 3}, "FFFFF"),
    ],
)
def test_layers_of_a_config_file(tmp_path: Path, keys: dict[str, Any], pattern: str) -> None:
    assert kinds(write(tmp_path, **keys)) == pattern


def test_the_language_part_of_a_multimodal_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {**LLAMA_8B, "sliding_window": 512, "sliding_window_pattern": 2}
    del text["torch_dtype"]
    path.write_text(json.dumps({"text_config": text, "dtype": "float16"}))
    assert kinds(str(path)) == "WFWFWFWF"
    assert {layer.dtype for layer in layers_of_model(str(path))} == {"f16"}


def test_full_layers_may_have_heads_of_their_own(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        sliding_window=512,
        sliding_window_pattern=2,
        num_global_key_value_heads=2,
        global_head_dim=256,
    )
    assert [(layer.kv_heads, layer.head_size) for layer in layers_of_model(model)[:2]] == [(8, 128), (2, 256)]


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_file_without_a_type_or_in_32_bits_is_kept_in_bf16_as_by_vllm(
    tmp_path: Path, dtype: str | None
) -> None:
    assert {layer.dtype for layer in layers_of_model(write(tmp_path, torch_dtype=dtype))} == {"bf16"}


@pytest.mark.parametrize(("kv_dtype", "kept"), [("auto", "f16"), ("bf16", "bf16"), ("fp8", "u8")])
def test_the_type_of_the_cache_replaces_that_of_the_model(tmp_path: Path, kv_dtype: str, kept: str) -> None:
    model = write(tmp_path, torch_dtype="float16")
    assert {layer.dtype for layer in layers_of_model(model, kv_dtype=kv_dtype)} == {kept}


@pytest.mark.parametrize(
    ("kind", "size"), [("gemma", 256), ("gemma2", 256), ("gemma3", 256), ("gpt_oss", 64), ("llama", 240)]
)
def test_a_head_without_a_size_has_that_of_its_type(tmp_path: Path, kind: str, size: int) -> None:
    keys = {"hidden_size": 3840, "num_attention_heads": 16, "sliding_window": 1024}
    model = write(tmp_path, model_type=kind, **keys)
    assert {layer.head_size for layer in layers_of_model(model)} == {size}


def test_a_32_bit_state_of_the_file_is_read(tmp_path: Path) -> None:
    model = write(tmp_path, **CONFIGS["Qwen3-Next-80B-A3B"], mamba_ssm_dtype="float32")
    assert layers_of_model(model)[0].dtypes == ("bf16", "f32")
    assert layers_of_model(model, state_dtype="bfloat16")[0].dtypes == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv"] * 8}, "layer_types: 'conv' is not known; known are full_attention"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for num_hidden_layers=8; make them equal",
        ),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing; add it"),
        ({"layer_types": ["mamba"] * 8}, "the states of its layers are not known; known are Mamba"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: 'X' is not known"),
        ({"mamba_d_state": 16}, "has states and does not list its layers; add layers_block_type"),
        ({"compress_ratios": [4]}, "compress_ratios: compressed MLA .* not supported; give the layers"),
        ({"is_encoder_decoder": True}, "encoders are not supported; use a decoder"),
        ({"torch_dtype": "int3"}, "torch_dtype: 'int3' is not known; known are bfloat16"),
        ({"hidden_size": 4097}, "head_dim is missing, and hidden_size=4097 is not a multiple"),
        ({"linear_attn_config": 3}, "linear_attn_config must be a mapping, got 3"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "sliding_window": 64},
            "kv_lora_rank: MLA with windows or chunks is not supported; give the layers",
        ),
        ({"hybrid_layer_pattern": [1, 0] * 4}, "hybrid_layer_pattern: windows with heads of their own"),
    ],
)
def test_a_file_that_does_not_say_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of_model(write(tmp_path, **keys))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            "gpt-oss-21b",
            {},
            "'gpt-oss-21b' is neither a known name nor the path of a config.json; nearest are gpt-oss",
        ),
        (
            "gpt-oss-20b",
            {"tensor_parallel": 3},
            "tensor_parallel=3 does not fit the 8 KV heads of model gpt-oss-20b",
        ),
        ("Qwen3-Next-80B-A3B", {"tensor_parallel": 3}, "tensor_parallel=3 does not (fit|divide)"),
        ("gpt-oss-20b", {"kv_dtype": "int3"}, "int3"),
        ("Qwen3-Next-80B-A3B", {"state_dtype": "int3"}, "state_dtype: 'int3' is not known"),
        ("gpt-oss-20b", {"state_dtype": "float32"}, "state_dtype: no layer of gpt-oss-20b keeps a state"),
        ("gpt-oss-20b", {"block_size": 0}, "block_size must be an int of at least 1, got 0"),
        ("DeepSeek-V3", {"block_size": 0}, "block_size must be an int of at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_a_model_are_refused(
    model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of_model(model, **settings)


@pytest.mark.parametrize("unit", [0, -16])
def test_a_unit_of_hashing_is_at_least_one_token(unit: int) -> None:
    with pytest.raises(ConfigError, match="prefix_match_unit must be an int of at least 1"):
        groups_of_model("gpt-oss-20b", memory_bytes=8 << 30, max_model_len=4096, prefix_match_unit=unit)
