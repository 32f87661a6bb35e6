"""Shapes from files, weights from files: what does not fit is named before anything is allocated."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qwen3.building import CPU, TINY
from understudy.errors import ConfigError
from understudy.qwen3.config import SHAPES, Qwen3Config, find_config
from understudy.qwen3.weights import expected_shapes, load_weights, random_weights

if TYPE_CHECKING:
    from pathlib import Path

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

FOUR_B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_file_gives_the_published_shape() -> None:
    config = Qwen3Config.from_dict(FOUR_B)
    assert config == SHAPES["Qwen3-4B"] == find_config("Qwen/Qwen3-4B")
    assert config.attention_width == 4096
    assert config.parameters == 36 * 100_930_816 + 151936 * 2560 + 2560
    assert config.layout(16).bytes_per_token == 147_456
    assert config.layout(16).page_stride == 1_179_648


def test_window_and_rotation_come_from_the_file() -> None:
    newer = {**FOUR_B, "max_position_embeddings": 262144, "rope_theta": 5_000_000}
    config = Qwen3Config.from_dict(newer)
    assert (config.max_positions, config.rope_theta) == (262144, 5e6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures="),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling="),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_experts": 128}, "num_experts is not a key"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7 does not divide"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"torch_dtype": "int4"}, "dtype 'int4'"),
    ],
)
def test_what_the_engine_cannot_honour_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Qwen3Config.from_dict({**FOUR_B, **change})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        Qwen3Config.from_dict({name: value for name, value in FOUR_B.items() if name != key})


def test_the_stop_set_of_the_generation_config_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FOUR_B))
    assert Qwen3Config.from_file(tmp_path).eos_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert Qwen3Config.from_file(tmp_path).eos_token_ids == (151645, 151643)


def _checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in expected_shapes(TINY).items()}


def test_one_file_and_shards_load_alike(tmp_path: Path) -> None:
    tensors = _checkpoint()
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    safetensors_torch.save_file(tensors, one / "model.safetensors")
    where = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        safetensors_torch.save_file({n: t for n, t in tensors.items() if where[n] == file}, many / file)
    (many / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    seen: list[tuple[int, int]] = []
    a = load_weights(TINY, one, CPU)
    b = load_weights(TINY, many, CPU, progress=lambda done, of: seen.append((done, of)))
    assert a.layers[1].qkv.equal(b.layers[1].qkv)
    assert a.head is a.embed
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert a.layers[1].qkv[: q.shape[0]].equal(q)
    assert seen[-1] == (len(tensors), len(tensors))


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("model.norm.weight", None, "model.norm.weight is missing"),
        ("model.norm.weight", (49,), r"model.norm.weight has shape \[49\], not \[48\]"),
        ("model.layers.9.mlp.up_proj.weight", (2, 2), "model.layers.9.mlp.up_proj.weight is not part"),
    ],
)
def test_a_tensor_that_is_missing_misshapen_or_too_many_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, word: str
) -> None:
    tensors = _checkpoint()
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=word):
        load_weights(TINY, tmp_path, CPU)


def test_a_shard_that_is_not_there_or_elsewhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.safetensors is missing"):
        load_weights(TINY, tmp_path, CPU)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(ConfigError, match=r"x.safetensors is missing"):
        load_weights(TINY, tmp_path, CPU)


def test_two_ranks_hold_the_halves_of_what_one_holds() -> None:
    one = random_weights(TINY, 3, CPU)
    left, right = (random_weights(TINY, 3, CPU, rank=rank, ranks=2) for rank in range(2))
    heads = TINY.num_heads * TINY.head_dim
    assert torch.cat((left.layers[0].qkv[: heads // 2], right.layers[0].qkv[: heads // 2])).equal(
        one.layers[0].qkv[:heads]
    )
    assert torch.cat((left.layers[0].down, right.layers[0].down), dim=1).equal(one.layers[0].down)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide"):
        random_weights(TINY, 3, CPU, rank=0, ranks=3)
