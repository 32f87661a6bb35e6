"""Reads the sizes of attention, states and indexers from the keys of a `config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import gated_delta_states, mamba2_states
from understudy.timing.attention import Indexer, LatentAttention
from understudy.timing.layer_pattern import indexed_layers, layer_kinds, window_tokens

if TYPE_CHECKING:
    from understudy.timing.model_config import ModelConfig

_MEASURED = "give measured times instead"
_UNTIMED = {
    "deepseek_v32": "sparse attention (DeepSeek V3.2's indexer)",
    "deepseek_v4": "compressed and sparse attention (DeepSeek V4)",
    "kimi_linear": "Kimi delta attention",
}
"""Kinds of models whose groups may be known, but not their times, by `model_type`."""


def read_kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer. ConfigError for kinds whose times are not known."""
    if reason := _UNTIMED.get(config.model_type):
        raise ConfigError(
            f"{config.where}: model_type {config.model_type!r}: {reason} is not timed; {_MEASURED}"
        )
    if config.has("linear_attn_config"):
        raise ConfigError(
            f"{config.where}: linear_attn_config: Kimi delta attention is not timed; {_MEASURED}"
        )
    if config.has("index_head_dim") and config.model_type != "glm_moe_dsa":
        raise ConfigError(
            f"{config.where}: index_head_dim: sparse attention, whose indexer selects tokens, is not timed; {_MEASURED}"
        )
    kinds = layer_kinds(config)
    named = set(kinds)
    is_mamba2 = config.model_type == "nemotron_h"
    if (
        ("state" in named and not (is_mamba2 or config.has("linear_num_value_heads")))
        or ("" in named and not is_mamba2)
        or config.has("state_size", "mamba_d_state")
    ):
        raise ConfigError(
            f"{config.where}: only layers of full or sliding attention, of gated delta net and of Nemotron's Mamba 2 "
            f"are timed; {_MEASURED}"
        )
    if {"window", "chunk"} <= named:
        raise ConfigError(
            f"{config.where}: layers with windows next to layers with chunks are not supported; {_MEASURED}"
        )
    if "state" in named and {"window", "chunk"} & named:
        raise ConfigError(
            f"{config.where}: layers with states next to windows are not supported; {_MEASURED}"
        )
    return kinds


def read_attention(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Return the sizes of heads, or those of a latent, and what selects tokens."""
    heads = config.number("num_attention_heads")
    indexer = {"indexer": _read_indexer(config)}
    if config.has("kv_lora_rank"):
        latent = LatentAttention(
            rank=config.number("kv_lora_rank"),
            rope=config.number("qk_rope_head_dim"),
            key=config.number("qk_nope_head_dim"),
            value=config.number("v_head_dim"),
            query_rank=config.optional("q_lora_rank", least=0) or 0,
        )
        return {
            "num_heads": heads,
            "kv_heads": 1,
            "head_dim": latent.key + latent.rope,
            "latent": latent,
            **indexer,
        }
    kv_heads, size = config.number("num_key_value_heads", default=heads), config.head_dim(heads)
    full: dict[str, int] = {}
    if "window" in kinds:
        full = {
            "full_kv_heads": config.number("num_global_key_value_heads", default=kv_heads),
            "full_head_dim": config.number("global_head_dim", default=size),
        }
        if full == {"full_kv_heads": kv_heads, "full_head_dim": size}:
            full = {}
    gated = {"gated_attention": True} if config.switch("attn_output_gate", default=False) else {}
    return {"num_heads": heads, "kv_heads": kv_heads, "head_dim": size, **full, **gated, **indexer}


def read_windows(config: ModelConfig, kinds: list[str]) -> dict[str, Any]:
    """Return the number of layers with windows or chunks, and the tokens of one."""
    if windows := kinds.count("window"):
        return {"window_layers": windows, "window_tokens": window_tokens(config)}
    if chunks := kinds.count("chunk"):
        return {"window_layers": chunks, "window_tokens": config.number("attention_chunk_size")}
    return {}


def read_states(config: ModelConfig, kinds: list[str], hidden: int) -> dict[str, Any]:
    """Return the states of gated delta net or Mamba 2: a matrix per head, and the last inputs of a convolution."""
    if "state" not in kinds:
        return {}
    layers = kinds.count("state")
    if config.has("mamba_num_heads"):
        return mamba2_states(
            layers,
            hidden,
            config.number("mamba_num_heads"),
            config.number("mamba_head_dim"),
            config.number("n_groups"),
            config.number("ssm_state_size"),
            config.number("conv_kernel"),
            width=2 if config.state_dtype() in ("bf16", "f16") else 4,  # vLLM's default for Nemotron
        )
    heads, size = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    key_size = config.number("linear_key_head_dim")
    return gated_delta_states(
        layers,
        hidden,
        heads,
        config.number("linear_num_key_heads") * key_size,
        heads * size,
        key_size,
        config.number("linear_conv_kernel_dim"),
        width=4 if config.state_dtype() == "f32" else 2,
    )


def _read_indexer(config: ModelConfig) -> Indexer | None:
    """Return what selects tokens for sparse attention; None if every token is attended to."""
    layers = sum(indexed_layers(config))
    if not layers:
        return None
    if config.has("sparse_attention_config"):
        inner = config.inner("sparse_attention_config")
        size = inner.number("sparse_index_dim")
        return Indexer(
            layers=layers,
            heads=inner.number("sparse_num_index_heads"),
            size=size,
            tokens=inner.number("sparse_topk_blocks") * inner.number("sparse_block_size"),
            key_bytes=2 * size,
        )
    size = config.number("index_head_dim")
    return Indexer(
        layers=layers,
        heads=config.number("index_n_heads"),
        size=size,
        tokens=config.number("index_topk"),
        key_bytes=size + size // 128 * 4,  # in fp8, with a 32-bit scale for each 128
    )
