"""`groups_of_model`: KV cache groups of a known model, or of a local `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.defaults import BLOCK_SIZE, LATENT_BLOCK_SIZE, SPARSE_BLOCK_SIZE
from understudy.errors import ConfigError
from understudy.groups.known_layers import known_config
from understudy.groups.layer import Layer
from understudy.groups.plan import GroupPlan, plan_groups
from understudy.groups.states import state_layer
from understudy.kv.counts import count
from understudy.timing.attention import FP8_SPARSE_BYTES
from understudy.timing.layer_pattern import cached_kinds, indexed_layers, window_tokens
from understudy.timing.model_config import ModelConfig, read_dtype
from understudy.timing.weight_types import kv_type


def groups_of_model(
    model: str,
    *,
    memory_bytes: int,
    max_model_len: int,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    tensor_parallel: int = 1,
    disable_hybrid: bool | None = None,
    **settings: Any,
) -> GroupPlan:
    """Plan the KV cache groups of `model` in `memory_bytes` of each GPU.

    `disable_hybrid` is on by default for chunked local attention, as in vLLM; `settings` are those of `plan_groups`.
    ConfigError names an unknown model, a key of its file, or the setting.
    """
    layers = layers_of_model(
        model,
        block_size=block_size,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        tensor_parallel=tensor_parallel,
    )
    if disable_hybrid is None:
        disable_hybrid = any(layer.kind == "chunked_local" for layer in layers)
    return plan_groups(
        layers,
        memory_bytes=memory_bytes,
        max_model_len=max_model_len,
        disable_hybrid=disable_hybrid,
        **settings,
    )


def config_of_model(model: str) -> ModelConfig:
    """Return the configuration of a known model, or the file at a path or in a folder."""
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return ModelConfig.read(path / "config.json" if path.is_dir() else path)
    return known_config(model)


def layers_of_model(
    model: str,
    *,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    tensor_parallel: int = 1,
) -> list[Layer]:
    """Return what each layer of `model` (a known name, or the path of a config.json) keeps on one GPU.

    `block_size` is 64 for MLA and 16 for others by default; `state_dtype` replaces the type of recurrent states.
    """
    config = config_of_model(model)
    kinds = cached_kinds(config)
    gpus = count("tensor_parallel", tensor_parallel, 1, ConfigError)
    if block_size is not None:
        count("block_size", block_size, 1, ConfigError)
    if state_dtype is not None and "state" not in kinds:
        raise ConfigError(f"state_dtype: no layer of {model} keeps a state; leave it out")
    dtype = config.dtype()
    cache = dtype if kv_dtype in (None, "auto") else {"fp8": "u8"}.get(named := kv_type(kv_dtype), named)
    found: dict[str, list[Layer]] = {
        kind: _attention(config, kind, block_size, cache, gpus) for kind in set(kinds) - {"state"}
    }
    if "state" in kinds:
        state = None if state_dtype is None else read_dtype("state_dtype", state_dtype)
        found["state"] = [
            state_layer(
                config, tensor_parallel=gpus, dtype=dtype, state_dtype=state or _state_dtype(config, dtype)
            )
        ]
    layers = []
    for kind, is_indexed in zip(kinds, indexed_layers(config)[: len(kinds)], strict=True):
        layers += found[kind]
        if is_indexed:
            layers.append(_index_keys(config, found[kind][0].tokens))
    return layers


def _attention(
    config: ModelConfig, kind: str, block_size: int | None, dtype: str, tensor_parallel: int
) -> list[Layer]:
    """Return the cache of an attention layer."""
    if config.has("kv_lora_rank"):
        return _latent(config, LATENT_BLOCK_SIZE if block_size is None else block_size, dtype)
    usual = SPARSE_BLOCK_SIZE if config.has("sparse_attention_config") else BLOCK_SIZE
    block = usual if block_size is None else block_size
    heads = config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    head_size = config.head_dim(heads)
    if kind == "full":
        kv_heads = config.number("num_global_key_value_heads", default=kv_heads)
        head_size = config.number("global_head_dim", default=head_size)
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ConfigError(
            f"tensor_parallel={tensor_parallel} does not fit the {kv_heads} KV heads of {config.where}; choose a "
            "divisor or a multiple"
        )
    named: dict[str, Any] = {"kind": "full"}
    if kind == "window":
        named = {"kind": "sliding_window", "window": window_tokens(config)}
    elif kind == "chunk":
        named = {"kind": "chunked_local", "chunk": config.number("attention_chunk_size")}
    kv_heads = max(kv_heads // tensor_parallel, 1)
    return [Layer(**named, block_size=block, kv_heads=kv_heads, head_size=head_size, dtype=dtype)]


def _latent(config: ModelConfig, block_size: int, dtype: str) -> list[Layer]:
    size = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    sparse = config.has("index_head_dim")
    packed = FP8_SPARSE_BYTES if sparse and dtype == "u8" else None
    return [
        Layer(kind="mla", block_size=block_size, kv_heads=1, head_size=size, dtype=dtype, state_bytes=packed)
    ]


def _index_keys(config: ModelConfig, block_size: int) -> Layer:
    """Return the cache of an indexer: one key per token, of MLA in fp8 with a 32-bit scale for each 128."""
    if config.has("sparse_attention_config"):
        size, dtype = config.inner("sparse_attention_config").number("sparse_index_dim"), "bf16"
    else:
        size, dtype = config.number("index_head_dim"), "u8"
        size += size // 128 * 4
    return Layer(kind="mla", block_size=block_size, kv_heads=1, head_size=size, dtype=dtype, role="indexer")


def _state_dtype(config: ModelConfig, dtype: str) -> str | None:
    """Return the type of recurrent states: the file's, or vLLM's default for the architecture."""
    named = config.state_dtype()
    if named is not None or config.has("linear_attn_config"):
        return named
    return "f32" if config.model_type == "nemotron_h" else dtype
