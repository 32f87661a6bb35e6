"""`ModelConfig`: the keys of a Hugging Face `config.json` that say what each layer keeps in the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.checks import read_settings
from understudy.errors import ConfigError
from understudy.kv.counts import count

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    **dict.fromkeys(("full_attention", "attention"), "full"),
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    **dict.fromkeys(("linear_attention", "mamba"), "state"),
    **dict.fromkeys(("mlp", "moe"), ""),
}
"""Kinds of layers by their names in `layer_types` and `layers_block_type`; "" keeps nothing."""
_LETTERS = {"M": "state", "*": "full", "-": "", "E": ""}
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "cohere2": 4}
"""Layers from one with full attention to the next, by `model_type`, for files that do not say it."""
_UNSUPPORTED = {
    "compress_ratios": "compressed MLA (DeepSeek-V4)",
    "attn_type_list": "lightning attention",
    "ssm_cfg": "layers without attention",
}


class ModelConfig:
    """Keys of one model's configuration; `where` names it in messages."""

    def __init__(self, where: str, content: dict[str, Any]) -> None:
        text = content.get("text_config")  # multimodal models have their language model here
        if isinstance(text, dict):
            content = {"torch_dtype": content.get("torch_dtype"), "dtype": content.get("dtype"), **text}
        self.where = where
        self.content = content

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """Read a `config.json`. ConfigError names the file."""
        return cls(f"model {path}", read_settings(path, "model "))

    def has(self, *keys: str) -> bool:
        """Whether one of `keys` is given."""
        return any(self.content.get(key) is not None for key in keys)

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return the whole number of the first key that is given, or `default`. ConfigError names the first key."""
        for key in keys:
            if self.content.get(key) is not None:
                return count(f"{self.where}: {key}", self.content[key], 1, ConfigError)
        if default is None:
            raise ConfigError(f"{self.where}: {keys[0]} is missing; add it to the file")
        return default

    def inner(self, key: str) -> ModelConfig:
        """Return the mapping of `key`."""
        content = self.content.get(key)
        if not isinstance(content, dict):
            raise ConfigError(f"{self.where}: {key} must be a mapping, got {content!r}")
        return ModelConfig(f"{self.where}: {key}", content)

    @property
    def model_type(self) -> str:
        """Value of `model_type` without the suffix of language models in multimodal ones."""
        return str(self.content.get("model_type", "")).removesuffix("_text")

    def layer_kinds(self) -> list[str]:
        """Return full, window, chunk or state for each layer with a KV cache, in order."""
        for key, what in _UNSUPPORTED.items():
            if self.has(key):
                raise ConfigError(f"{self.where}: {key}: {what}: not supported; give the layers themselves")
        if self.content.get("is_encoder_decoder"):
            raise ConfigError(f"{self.where}: is_encoder_decoder: encoders are not supported; use a decoder")
        kinds = self._named_kinds() or self._periodic_kinds(self.number("num_hidden_layers"))
        shared = (
            self.content.get("num_kv_shared_layers") or 0
        )  # the last layers use the cache of earlier ones
        return [kind for kind in kinds[: len(kinds) - int(shared)] if kind]

    def _named_kinds(self) -> list[str] | None:
        """Return the kinds that the file lists by layer; None if it has no such list."""
        if self.has("linear_attn_config"):
            linear = self.inner("linear_attn_config").content
            full = set(linear.get("full_attn_layers") or ())  # counted from 1
            return ["full" if n in full else "state" for n in range(1, self.number("num_hidden_layers") + 1)]
        pattern = self.content.get("hybrid_override_pattern")
        names: dict[str, str] = _LETTERS if pattern else KINDS
        key = next(
            (
                key
                for key in ("hybrid_override_pattern", "layer_types", "layers_block_type")
                if self.content.get(key)
            ),
            None,
        )
        if key is None:
            return None
        listed = list(self.content[key])
        for name in listed:
            if name not in names:
                raise ConfigError(f"{self.where}: {key}: {name!r} is not known; known are {', '.join(names)}")
        layers = self.number("num_hidden_layers", default=len(listed))
        if len(listed) != layers:
            raise ConfigError(
                f"{self.where}: {key} has {len(listed)} entries for num_hidden_layers={layers}; make them equal"
            )
        return [names[name] for name in listed]

    def _periodic_kinds(self, layers: int) -> list[str]:
        """Return the kinds of a file that says only where full attention is."""
        content = self.content
        if self.has("attn_layer_indices"):
            return ["full" if n in content["attn_layer_indices"] else "state" for n in range(layers)]
        if self.has("attn_layer_period"):
            period, offset = self.number("attn_layer_period"), int(content.get("attn_layer_offset") or 0)
            return ["full" if n % period == offset else "state" for n in range(layers)]
        if self.has("linear_num_value_heads"):
            period = self.number("full_attention_interval", default=4)
            return ["state" if (n + 1) % period else "full" for n in range(layers)]
        if self.has("attention_chunk_size"):
            rotated = content.get("no_rope_layers")  # 0: full attention without positions
            if rotated:
                return ["chunk" if rotated[n] else "full" for n in range(layers)]
            period = self.number("no_rope_layer_interval", default=4)
            return ["chunk" if (n + 1) % period else "full" for n in range(layers)]
        if self.has("ssm_state_size", "mamba_d_state", "state_size"):
            raise ConfigError(
                f"{self.where}: it has states and does not list its layers; add layers_block_type to the file"
            )
        if not content.get("sliding_window") or content.get("use_sliding_window") is False:
            return ["full"] * layers
        pattern = content.get("sliding_window_pattern") or content.get("_sliding_window_pattern")
        period = pattern or _PERIODS.get(self.model_type, 0)
        if period:
            return ["window" if (n + 1) % int(period) else "full" for n in range(layers)]
        first = content.get("max_window_layers")
        return ["full" if first is not None and n < int(first) else "window" for n in range(layers)]
