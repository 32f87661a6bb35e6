"""What a token weighs and how many blocks fit, checked against sums done by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.tiers import ModelShape
from understudy.tiers.model_shape import MODELS

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def read(folder: Path, **config: Any) -> ModelShape:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return ModelShape.find(str(path))


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("Qwen3-0.6B", 28 * 2 * 8 * 128 * 2),
        ("Qwen3-0.6B", 114_688),
        ("Qwen3-8B", 147_456),
        ("Qwen3-32B", 262_144),
        ("Qwen3-30B-A3B", 98_304),
        ("Qwen2.5-7B", 57_344),
        ("Llama-3.1-8B", 131_072),
        ("Llama-3.1-70B", 327_680),
        ("Llama-3.1-405B", 516_096),
        ("Mistral-7B", 131_072),
        ("DeepSeek-V3", 61 * 576 * 2),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 131_072),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 131_072),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 98_304),
        ("deepseek-ai/deepseek-v3", 70_272),
        *(
            (name, 61 * (512 + 64) * 2)
            for name in ("moonshotai/Kimi-K2-Instruct", "Kimi-K2.5", "DeepSeek-V3.1")
        ),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512", 70_272),
        ("GLM-4.7-Flash", 47 * 576 * 2),
        ("GLM-4.7", 92 * 2 * 8 * 128 * 2),
    ],
)
def test_a_token_of_a_known_model_weighs(model: str, bytes_per_token: int) -> None:
    assert ModelShape.find(model).bytes_per_token() == bytes_per_token


def test_every_known_model_is_found_by_its_name() -> None:
    for name, shape in MODELS.items():
        assert ModelShape.find(name) is shape
        assert shape.bytes_per_token() > 0


def test_a_smaller_type_of_the_cache_halves_it() -> None:
    shape = ModelShape.find("Llama-3.1-8B")
    assert shape.bytes_per_token(kv_dtype="fp8") == 65_536
    assert shape.bytes_per_token(kv_dtype="auto") == 131_072
    with pytest.raises(ConfigError, match="dtype 'fp7' is not known"):
        shape.bytes_per_token(kv_dtype="fp7")


def test_heads_are_divided_among_gpus_then_repeated_and_a_latent_is_whole_on_each() -> None:
    shape = ModelShape.find("Llama-3.1-70B")
    assert [shape.bytes_per_token(tensor_parallel=n) for n in (1, 2, 8, 16)] == [
        327_680,
        163_840,
        40_960,
        40_960,
    ]
    with pytest.raises(ConfigError, match=r"tensor_parallel=3 does not fit the 8 KV heads of Llama-3.1-70B"):
        shape.bytes_per_token(tensor_parallel=3)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        shape.bytes_per_token(tensor_parallel=0)
    assert ModelShape.find("DeepSeek-V3").bytes_per_token(tensor_parallel=8) == 70_272


# --- from a file ----------------------------------------------------------------------------------------


def test_a_config_is_read_from_its_path_or_its_folder(tmp_path: Path) -> None:
    assert read(tmp_path, **LLAMA_8B).bytes_per_token() == 131_072
    assert ModelShape.find(str(tmp_path)).bytes_per_token() == 131_072


def test_heads_and_their_size_have_the_usual_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, **{**LLAMA_8B, "num_key_value_heads": ...}).kv_heads == 32
    assert read(tmp_path, **LLAMA_8B, head_dim=64).head_dim == 64
    assert read(tmp_path, **LLAMA_8B, head_dim=None).head_dim == 128


def test_latent_attention_stores_one_vector(tmp_path: Path) -> None:
    shape = read(tmp_path, **LLAMA_8B, kv_lora_rank=512, qk_rope_head_dim=64)
    assert shape.bytes_per_token() == 32 * 576 * 2


def test_the_language_part_of_a_model_that_sees_is_used(tmp_path: Path) -> None:
    inner = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    assert read(tmp_path, text_config=inner, dtype="float16").bytes_per_token() == 131_072


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be an int"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an int of at least 1"),
        ({"hidden_size": 4097}, "hidden_size=4097 is not a multiple of num_attention_heads=32"),
        ({"torch_dtype": "int3"}, "torch_dtype: 'int3' is not known"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 9},
            "several kinds; give --gpu, .* or kv_bytes_per_token",
        ),
        ({"layer_types": ["linear_attention"] * 32}, "more than keys and values"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers=32"),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}, "several kinds"),
        ({"sliding_window_pattern": 6, "sliding_window": 9}, "several kinds"),
        ({"sliding_window_pattern": 6}, "sliding_window is missing, and there is a pattern of it"),
        ({"index_head_dim": 128}, "more than keys and values"),
        ({"is_encoder_decoder": True}, "encoder and a decoder"),
    ],
)
def test_a_config_that_does_not_say_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read(tmp_path, **{**LLAMA_8B, **change})


@pytest.mark.parametrize("dtype", [..., None, "float32"])
def test_a_file_without_a_type_or_in_32_bits_is_kept_in_16_as_by_vllm(tmp_path: Path, dtype: object) -> None:
    assert read(tmp_path, **{**LLAMA_8B, "torch_dtype": dtype}).bytes_per_token() == 131_072


@pytest.mark.parametrize(
    "harmless",
    [
        {"layer_types": ["full_attention"] * 32},
        {"sliding_window": 4096},  # in every layer
        {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
    ],
)
def test_windows_that_change_nothing_are_accepted(tmp_path: Path, harmless: dict[str, Any]) -> None:
    assert read(tmp_path, **LLAMA_8B, **harmless).bytes_per_token() == 131_072


def test_a_file_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ModelShape.find(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelShape.find(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="a JSON object at the top level"):
        ModelShape.find(str(tmp_path))


# --- blocks of a GPU --------------------------------------------------------------------------------------


def test_blocks_fill_what_the_weights_leave() -> None:
    shape = ModelShape.find("Llama-3.1-8B")
    # 80 GB * 0.92 - 16 GB = 57.6 GB, in blocks of 16 * 131,072 = 2,097,152 bytes.
    assert shape.num_gpu_blocks(block_size=16, gpu_memory="80GB", weights="16GB") == 27_465
    # With 2 GPUs: (73.6 - 8 - 2) GB in blocks of half the size.
    assert (
        shape.num_gpu_blocks(
            block_size=16, gpu_memory="80GB", weights="16GB", overhead="2GB", tensor_parallel=2
        )
        == 60_653
    )


def test_utilisation_is_the_decimal_that_was_written() -> None:
    shape = ModelShape("tiny", 1, 1, 1, "fp8")  # 2 bytes a token
    # 29 - 19 = 10 bytes; 100 * 0.29 in floating point is 28.999...
    assert shape.num_gpu_blocks(block_size=1, gpu_memory=100, weights=19, gpu_memory_utilization=0.29) == 5


def test_a_model_that_does_not_fit_is_refused() -> None:
    shape = ModelShape.find("Llama-3.1-70B")
    with pytest.raises(
        ConfigError, match=r"gpu_memory: Llama-3.1-70B takes 141000000000 of 73600000000 usable"
    ):
        shape.num_gpu_blocks(block_size=16, gpu_memory="80GB", weights="141GB")
    for utilization in (0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            shape.num_gpu_blocks(
                block_size=16, gpu_memory="80GB", weights="1GB", gpu_memory_utilization=utilization
            )
