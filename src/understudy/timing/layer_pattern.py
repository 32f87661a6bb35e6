"""Kinds of a model's layers, from its `config.json`: the one reader for step times and KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.timing.model_config import ModelConfig

_KINDS = {
    **dict.fromkeys(("full_attention", "attention"), "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    **dict.fromkeys(("linear_attention", "mamba"), "state"),
    **dict.fromkeys(("mlp", "moe"), ""),
}
"""Kinds of layers by their names in `layer_types` and `layers_block_type`; "" keeps nothing."""
_LETTERS = {"M": "state", "*": "full", "-": "", "E": ""}
_PERIODS = {
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), 4),
    "gemma3n": 5,
    **dict.fromkeys(("gemma3", "gemma4"), 6),
}
"""Layers from one with full attention to the next, by `model_type`, for files that do not say it."""
_UNSUPPORTED = {
    "compress_ratios": "compressed MLA (DeepSeek-V4)",
    "ssm_cfg": "layers without attention",
    "hybrid_layer_pattern": "windows with heads of their own (MiMo-V2)",
}


def layer_kinds(config: ModelConfig) -> list[str]:
    """Return full, window, chunk or state for each layer, in order; "" for one that keeps nothing.

    ConfigError names the key that is wrong or not supported.
    """
    for key, what in _UNSUPPORTED.items():
        if config.has(key):
            raise ConfigError(f"{config.where}: {key}: {what}: not supported; give the layers themselves")
    if config.has("attn_type_list") and set(config.listed("attn_type_list", int, "0 and 1")) != {1}:
        raise ConfigError(
            f"{config.where}: attn_type_list: lightning attention: not supported; give the layers themselves"
        )
    if config.content.get("is_encoder_decoder"):
        raise ConfigError(f"{config.where}: is_encoder_decoder: encoders are not supported; use a decoder")
    kinds = _named_kinds(config) or _periodic_kinds(config, config.num_layers())
    if _has_no_windows(config):
        kinds = ["full" if kind == "window" else kind for kind in kinds]
    if "window" in kinds:
        window_tokens(config)
    if config.has("kv_lora_rank") and {"window", "chunk"} & set(kinds):
        raise ConfigError(
            f"{config.where}: kv_lora_rank: MLA with windows or chunks is not supported; give the layers themselves"
        )
    return kinds


def indexed_layers(config: ModelConfig) -> list[bool]:
    """Return for each layer with attention whether an indexer selects its tokens and keeps a key of each.

    ConfigError for a list that does not name each layer, and for indexers that layers share.
    """
    layers = sum(1 for kind in layer_kinds(config) if kind)
    if config.has("index_head_dim"):
        if config.has("indexer_types") and set(config.listed("indexer_types", str, "names")) != {"full"}:
            raise ConfigError(
                f"{config.where}: indexer_types: sparse attention with indexers that layers share is not supported; "
                "give the layers themselves"
            )
        return [True] * layers
    if not config.has("sparse_attention_config"):
        return [False] * layers
    inner = config.inner("sparse_attention_config")
    if not inner.switch("use_sparse_attention", default=True):
        return [False] * layers
    placed = inner.listed("sparse_attention_freq", int, "0 and 1, one per layer")
    if len(placed) != layers or set(placed) - {0, 1}:
        raise ConfigError(
            f"{inner.where}: sparse_attention_freq must have a 0 or 1 for each of {layers} layers"
        )
    return [bool(one) for one in placed]


def cached_kinds(config: ModelConfig) -> list[str]:
    """Return the kinds of the layers that have a KV cache or state of their own, in order."""
    kinds = layer_kinds(config)
    shared = shared_layers(config, len(kinds))  # the last layers use the cache of earlier ones
    kept = [kind for kind in kinds[: len(kinds) - shared] if kind]
    if not kept:
        raise ConfigError(f"{config.where}: no layer keeps KV or a state; give a model with attention")
    return kept


def shared_layers(config: ModelConfig, layers: int) -> int:
    """Return how many of the last `layers` read the KV cache of earlier ones. ConfigError if all would."""
    shared = config.number("num_kv_shared_layers", default=0, least=0)
    if shared >= layers:
        raise ConfigError(
            f"{config.where}: num_kv_shared_layers must be less than the {layers} layers, got {shared}; correct it"
        )
    return shared


def window_tokens(config: ModelConfig) -> int:
    """Return the tokens that a window attends to, the newest one included."""
    window = config.number("sliding_window", least=2)
    # vLLM counts the newest token of Cohere 2 apart from the window.
    return window + 1 if config.model_type == "cohere2" else window


def _has_no_windows(config: ModelConfig) -> bool:
    """Whether windows are turned off: sliding_window 0, as in vLLM, or use_sliding_window false."""
    window = config.content.get("sliding_window")
    is_zero = window == 0 and not isinstance(window, bool)
    return is_zero or not config.switch("use_sliding_window", default=True)


def _named_kinds(config: ModelConfig) -> list[str] | None:
    """Return the kinds that the file lists by layer; None if it has no such list."""
    if config.has("linear_attn_config"):
        inner, layers = config.inner("linear_attn_config"), config.num_layers()
        full = set(inner.listed("full_attn_layers", int, "numbers of layers, counted from 1"))
        _check_layers(inner, "full_attn_layers", full, range(1, layers + 1))
        return ["full" if n in full else "state" for n in range(1, layers + 1)]
    key = next(
        (key for key in ("hybrid_override_pattern", "layer_types", "layers_block_type") if config.has(key)),
        None,
    )
    if key is None:
        return None
    if key == "hybrid_override_pattern":
        text, names = config.content[key], _LETTERS
        if not isinstance(text, str):
            raise ConfigError(
                f"{config.where}: {key} must be text, such as M-M*, got {text!r}; write a letter per layer"
            )
        listed = list(text)
    else:
        listed, names = config.listed(key, str, "names, one per layer"), _KINDS
    for name in listed:
        if name not in names:
            raise ConfigError(
                f"{config.where}: {key}: {name!r} is not known; known are {', '.join(names)}; correct it, or give the "
                "layers themselves"
            )
    layers = config.num_layers(default=len(listed) or None)
    if len(listed) != layers:
        raise ConfigError(
            f"{config.where}: {key} has {len(listed)} entries for num_hidden_layers={layers}; make them equal"
        )
    return [names[name] for name in listed]


def _periodic_kinds(config: ModelConfig, layers: int) -> list[str]:
    """Return the kinds of a file that says only where full attention is."""
    if config.has("attn_layer_indices"):
        full = set(config.listed("attn_layer_indices", int, "numbers of layers, counted from 0"))
        _check_layers(config, "attn_layer_indices", full, range(layers))
        return ["full" if n in full else "state" for n in range(layers)]
    if config.has("attn_layer_period"):
        period = config.number("attn_layer_period")
        offset = config.number("attn_layer_offset", default=0, least=0)
        if offset >= period:
            raise ConfigError(
                f"{config.where}: attn_layer_offset must be less than attn_layer_period={period}, got {offset}; "
                "correct it"
            )
        return ["full" if n % period == offset else "state" for n in range(layers)]
    if config.has("linear_num_value_heads"):
        return _every(config.number("full_attention_interval", default=4), "state", layers)
    if config.has("attention_chunk_size"):
        config.number("attention_chunk_size")
        if config.content.get("no_rope_layers"):  # 0: full attention without positions
            rotated = config.listed("no_rope_layers", int, "0 or 1, one per layer")
            if len(rotated) != layers:
                raise ConfigError(
                    f"{config.where}: no_rope_layers has {len(rotated)} entries for num_hidden_layers={layers}; make "
                    "them equal"
                )
            return ["chunk" if rotates else "full" for rotates in rotated]
        return _every(config.number("no_rope_layer_interval", default=4), "chunk", layers)
    if config.has("ssm_state_size", "mamba_d_state", "state_size"):
        raise ConfigError(
            f"{config.where}: it has states and does not list its layers; add layers_block_type to the file"
        )
    patterns = ("sliding_window_pattern", "_sliding_window_pattern")
    if config.has(*patterns) and "sliding_window" not in config.content:
        raise ConfigError(f"{config.where}: sliding_window is missing, and there is a pattern of it; add it")
    if not config.content.get("sliding_window") or _has_no_windows(config):
        return ["full"] * layers
    said = config.optional(*patterns)
    said = _PERIODS.get(config.model_type) if said is None else said
    if said is not None:
        return _every(said, "window", layers)
    first = config.number("max_window_layers", default=0, least=0)
    return ["full" if n < first else "window" for n in range(layers)]


def _every(period: int, other: str, layers: int) -> list[str]:
    """Return full for each `period`-th layer, and `other` for those between."""
    return [other if (n + 1) % period else "full" for n in range(layers)]


def _check_layers(config: ModelConfig, key: str, given: set[int], layers: range) -> None:
    """Raise ConfigError for a layer that the model does not have."""
    if odd := sorted(given - set(layers)):
        raise ConfigError(
            f"{config.where}: {key} must name layers from {layers.start} to {layers.stop - 1}, got {odd[0]}; correct it"
        )
