"""Layers of known models, in the keys of the `config.json` of their repositories."""

from __future__ import annotations

from typing import Any

from understudy.timing.architecture import Architecture, plain_name
from understudy.timing.known_configs import CONFIGS as TIMED
from understudy.timing.known_models import MODELS, known_name, unknown_model
from understudy.timing.model_config import ModelConfig
from understudy.timing.names import name_key

_DEEPSEEK: dict[str, Any] = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {**_DEEPSEEK, "index_head_dim": 128},
    "DeepSeek-V3.2-Exp": {**_DEEPSEEK, "index_head_dim": 128},
    "Mistral-7B-v0.1": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "Ministral-8B": {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 32768,
        "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
    },
    "Qwen3-Next-80B-A3B": {
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
    "Kimi-Linear-48B-A3B": {
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "Nemotron-H-8B": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    "AI21-Jamba-1.5-Mini": {
        "num_hidden_layers": 32,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "Granite-4.0-H-Tiny": {
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    },
    "Bamba-9B": {
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    },
}
"""Models whose step times are not known, by repository name without owner and variant."""

_TYPES = {"gpt-oss": "gpt_oss", "Gemma-2": "gemma2", "Gemma-3": "gemma3"}
"""Values of `model_type`, which place the windows, by the start of the name."""
_BY_KEY = {name_key(name): name for name in CONFIGS}


def known_config(model: str) -> ModelConfig:
    """Return the configuration of a known model. ConfigError lists the nearest names of an unknown one."""
    spelled = name_key(model.rpartition("/")[2].lower().replace("-instruct", ""))
    name = _BY_KEY.get(spelled) or _BY_KEY.get(name_key(plain_name(model)))
    if name is not None:
        return ModelConfig(f"model {name}", {"torch_dtype": "bfloat16", **CONFIGS[name]})
    known = known_name(model)
    if known is None:
        raise unknown_model(model, [*MODELS, *CONFIGS])
    keys = {"torch_dtype": "bfloat16", **TIMED[known]} if known in TIMED else _keys_of(MODELS[known])
    return ModelConfig(f"model {known}", keys)


def _keys_of(model: Architecture) -> dict[str, Any]:
    keys = {
        "torch_dtype": "bfloat16",
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    if not model.window_layers:
        return keys
    if model.name.startswith("Llama-4"):
        return {**keys, "attention_chunk_size": model.window_tokens}
    kind = next(kind for start, kind in _TYPES.items() if model.name.startswith(start))
    return {**keys, "sliding_window": model.window_tokens, "model_type": kind}
