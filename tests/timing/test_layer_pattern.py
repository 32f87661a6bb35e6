"""The layers of a config.json: one reader for step times and groups, which refuses malformed values by their key."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.groups.known_layers import CONFIGS
from understudy.tiers.model_shape import ModelShape
from understudy.timing.contexts import known_context
from understudy.timing.find_architecture import find_architecture

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 1000,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
VALID: list[dict[str, Any]] = [
    {},
    {"sliding_window": 64},
    {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 4},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4},
    {"sliding_window": 64, "sliding_window_pattern": 4},
    {"sliding_window": 64, "_sliding_window_pattern": 4},
    {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 4},
    {"sliding_window": 64, "model_type": "gemma2"},
    {"sliding_window": 64, "model_type": "gemma3"},
    {"model_type": "gemma3"},
    {"sliding_window": 64, "model_type": "gpt_oss"},
    {"sliding_window": 64, "model_type": "cohere2"},
    {"sliding_window": 64, "model_type": "exaone4"},
    {"sliding_window": 0},
    {"attention_chunk_size": 64},
    {"attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0] * 2},
    {"attention_chunk_size": 64, "no_rope_layer_interval": 2},
    {"model_type": "llama4"},
    {"model_type": "llama4", "attention_chunk_size": None},
    {"attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"] * 4},
    {"num_kv_shared_layers": 3, "sliding_window": 64, "sliding_window_pattern": 4},
    {**DELTA, "full_attention_interval": 4},
    {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 4, "mamba_ssm_dtype": "float32"},
]


def write(folder: Path, **config: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**BASE, **config}))
    return str(path)


@pytest.mark.parametrize("keys", VALID, ids=json.dumps)
def test_step_times_and_groups_count_the_same_layers(tmp_path: Path, keys: dict[str, Any]) -> None:
    model = write(tmp_path, **keys)
    shape, layers = find_architecture(model), layers_of_model(model)
    limited = [layer for layer in layers if layer.kind in ("sliding_window", "chunked_local")]
    assert len(layers) == shape.num_layers - shape.shared_layers
    assert {layer.window or layer.chunk for layer in limited} <= {shape.window_tokens}
    if not shape.shared_layers:
        assert len(limited) == shape.window_layers
        assert sum(layer.kind == "mamba" for layer in layers) == shape.state_layers


def test_a_gemma_3_file_without_layer_types_has_one_full_layer_in_six(tmp_path: Path) -> None:
    keys = {"num_hidden_layers": 62, "sliding_window": 1024, "model_type": "gemma3_text"}
    shape = find_architecture(write(tmp_path, **keys))
    assert (shape.window_layers, shape.window_tokens) == (52, 1024)


def test_a_head_without_a_size_has_that_of_its_type(tmp_path: Path) -> None:
    keys = {"hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": None}
    assert find_architecture(write(tmp_path, **keys, model_type="gemma3")).head_dim == 256
    assert ModelShape.find(write(tmp_path, **keys, model_type="gemma")).head_dim == 256
    assert find_architecture(write(tmp_path, **keys)).head_dim == 240


def test_layers_that_share_a_cache_have_times_and_no_bytes(tmp_path: Path) -> None:
    model = write(tmp_path, num_kv_shared_layers=3)
    assert find_architecture(model).window_layers == 0
    assert ModelShape.find(model).bytes_per_token() == 5 * 2 * 4 * 64 * 2


def test_a_32_bit_state_takes_longer_than_one_of_16_bits(tmp_path: Path) -> None:
    short = find_architecture(write(tmp_path, **DELTA))
    wide = find_architecture(write(tmp_path, **DELTA, mamba_ssm_dtype="float32"))
    (layer,) = {one for one in layers_of_model(write(tmp_path, **DELTA)) if one.kind == "mamba"}
    assert short.state_bytes == layer.own_page_bytes == 2 * short.state_elements
    assert wide.state_bytes - short.state_bytes == 32 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"layer_types": 5}, "layer_types must be a list of names, one per layer, got 5; correct"),
        ({"layer_types": [["a"], 1, 1, 1]}, "layer_types must be a list of names"),
        ({"layer_types": []}, "layer_types has 0 entries for num_hidden_layers=8"),
        ({"num_kv_shared_layers": "a"}, "num_kv_shared_layers must be an int of at least 0, got 'a'"),
        ({"num_kv_shared_layers": 1.7}, "num_kv_shared_layers must be an int of at least 0, got 1.7"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an int of at least 0, got -1"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers must be less than the 8 layers, got 9"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ({"attention_chunk_size": 64, "no_rope_layers": 4}, "no_rope_layers must be a list of 0 or 1"),
        ({"attention_chunk_size": "a"}, "attention_chunk_size must be an int"),
        ({"attn_layer_indices": 3}, "attn_layer_indices must be a list of numbers of layers"),
        ({"attn_layer_indices": [9]}, "attn_layer_indices must name layers from 0 to 7, got 9"),
        ({"attn_layer_period": 4, "attn_layer_offset": "1"}, "attn_layer_offset must be an int"),
        ({"attn_layer_period": 4, "attn_layer_offset": 4}, "attn_layer_offset must be less than"),
        ({"linear_attn_config": {"full_attn_layers": 4}}, "full_attn_layers must be a list of numbers"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern must be text, such as M-M"),
        ({"sliding_window": 64, "max_window_layers": "a"}, "max_window_layers must be an int"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be an int"),
        ({"sliding_window": 64, "sliding_window_pattern": -2}, "sliding_window_pattern must be an int"),
        ({"sliding_window": 64, "sliding_window_pattern": True}, "sliding_window_pattern must be an int"),
        ({"sliding_window": 1}, "sliding_window must be an int of at least 2, got 1"),
        ({"sliding_window": "64"}, "sliding_window must be an int of at least 2, got '64'"),
        ({"sliding_window": 64, "use_sliding_window": "no"}, "use_sliding_window must be true or false"),
        ({"text_config": [1]}, "text_config must be a mapping"),
        ({"model_type": ["llama"]}, "model_type must be text"),
        ({"torch_dtype": 3}, "torch_dtype must be text"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000"),
        ({"layer_types": ["mlp"] * 8}, "no layer keeps KV or a state"),
    ],
)
def test_a_malformed_value_is_refused_by_its_key(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: (linear_attn_config: )?{problem}"):
        layers_of_model(write(tmp_path, **keys))


@pytest.mark.parametrize("kind", ["jamba", "bamba"])
def test_a_type_with_states_is_not_said_to_equal_another_type(tmp_path: Path, kind: str) -> None:
    (name,) = (name for name in CONFIGS if kind.split("_")[0] in name.lower())
    with pytest.raises(ConfigError, match="give measured times") as refused:
        find_architecture(write(tmp_path, **{**BASE, **CONFIGS[name], "model_type": kind}))
    assert "copy of the file" not in str(refused.value)


CONTEXT_KEYS = ("max_position_embeddings", "rope_scaling")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=9)
        | st.dictionaries(st.sampled_from(("a", "num_heads", "factor")), inner, max_size=2)
    ),
    max_leaves=9,
)
CASES = [{**BASE, **keys} for keys in VALID] + [{**BASE, **keys} for keys in CONFIGS.values()]
KEYS = sorted(
    {key for case in CASES for key in case}
    | {"text_config", "quantization_config", "num_experts", *CONTEXT_KEYS}
)


@settings(max_examples=100, deadline=None)
@given(case=st.sampled_from(CASES), changed=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_values_give_a_model_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], changed: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "layer_pattern"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**case, **changed}))
    for read in (layers_of_model, find_architecture, ModelShape.find, known_context):
        with suppress(ConfigError):
            read(str(folder))
