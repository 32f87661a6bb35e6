"""`ModelConfig`: the keys of a Hugging Face `config.json`, checked as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.checks import read_settings
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_OUTER = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
"""Keys that multimodal models may have next to `text_config`."""
_GEMMA: dict[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}
_UNLESS_SAID = {
    "gemma": _GEMMA,
    **{kind: {**_GEMMA, "sliding_window": 4096} for kind in ("gemma2", "vaultgemma")},
    "gemma3": {
        **_GEMMA,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "gemma4": {**_GEMMA, "sliding_window": 512, "global_head_dim": 512, "hidden_size_per_layer_input": 256},
    "gemma3n": {**_GEMMA, "sliding_window": 512, "num_kv_shared_layers": 15},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096},
    **{kind: {"sliding_window": 4096} for kind in ("exaone4", "olmo3", "mistral", "ministral")},
    **{kind: {"head_dim": 128} for kind in ("glm", "glm4", "qwen3", "minimax_m2", "seed_oss")},
    "ernie4_5": {"head_dim": 128, "tie_word_embeddings": True},
    "ernie4_5_moe": {"tie_word_embeddings": True},
    "llama4": {"head_dim": 128, "attention_chunk_size": 8192},
    "qwen3_next": {"head_dim": 256},
    "smollm3": {"tie_word_embeddings": True},
}
"""Values that transformers 5 has for keys a file leaves out, where they differ from those of most types."""
_OFF_BY_NULL = ("sliding_window", "attention_chunk_size")
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half"), "f16"),
    **dict.fromkeys(("float32", "fp32"), "f32"),
}
"""Short names of data types, by the names in files."""
_MOST_LAYERS = 10_000
_MOST = 2**40


class ModelConfig:
    """Keys of one model's configuration; `where` names it in messages."""

    def __init__(self, where: str, content: dict[str, Any]) -> None:
        self.where = where
        self.content = content
        text = content.get("text_config")  # multimodal models have their language model here
        if text is not None:
            outer = {key: content[key] for key in _OUTER if content.get(key) is not None}
            inner = self.inner("text_config").content
            self.content = {**outer, **{key: value for key, value in inner.items() if value is not None}}
            self.content |= {key: None for key in inner if key not in self.content}
        for key, value in _UNLESS_SAID.get(self.model_type, {}).items():
            if key not in self.content or (self.content[key] is None and key not in _OFF_BY_NULL):
                self.content = {**self.content, key: value}

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """Read a `config.json`. ConfigError names the file."""
        return cls(f"model {path}", read_settings(path, "model "))

    def has(self, *keys: str) -> bool:
        """Whether one of `keys` is given."""
        return any(self.content.get(key) is not None for key in keys)

    def optional(self, *keys: str, least: int = 1) -> int | None:
        """Return the whole number of the first key that is given; None without one. ConfigError names that key."""
        for key in keys:
            value = self.content.get(key)
            if value is not None:
                is_number = type(value) is int
                if not is_number or value < least:
                    raise ConfigError(
                        f"{self.where}: {key} must be an int of at least {least}, got {_show(value)}; correct it"
                    )
                if value > _MOST:
                    raise ConfigError(
                        f"{self.where}: {key} must be at most {_MOST:,}, got {value:,}; correct it"
                    )
                return int(value)
        return None

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the whole number of the first key that is given, or `default`. ConfigError names the first key."""
        found = self.optional(*keys, least=least)
        if found is not None:
            return found
        if default is None:
            raise ConfigError(f"{self.where}: {keys[0]} is missing; add it to the file")
        return default

    def num_layers(self, default: int | None = None) -> int:
        """Return the number of layers. ConfigError for a missing or absurd one."""
        layers = self.number("num_hidden_layers", default=default)
        if layers > _MOST_LAYERS:
            raise ConfigError(
                f"{self.where}: num_hidden_layers must be at most {_MOST_LAYERS:,}, got {layers:,}; correct it"
            )
        return layers

    def head_dim(self, heads: int) -> int:
        """Return the size of a head: the file's, the type's, or the hidden size divided among `heads`."""
        if self.has("head_dim", "attention_head_dim"):
            return self.number("head_dim", "attention_head_dim")
        hidden = self.number("hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"{self.where}: head_dim is missing, and hidden_size={hidden} is not a multiple of "
                f"num_attention_heads={heads}; add head_dim to the file"
            )
        return hidden // heads

    def listed(self, key: str, kind: type[Any], what: str) -> list[Any]:
        """Return the list of `key`, of values of `kind`. ConfigError says that it must list `what`."""
        values = self.content.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ConfigError(
                f"{self.where}: {key} must be a list of {what}, got {_show(values)}; correct it"
            )
        return values

    def switch(self, key: str, default: bool) -> bool:
        """Return true or false of `key`, or `default`. ConfigError for anything else."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} must be true or false, got {_show(value)}; correct it")
        return value

    def inner(self, key: str) -> ModelConfig:
        """Return the mapping of `key`."""
        content = self.content.get(key)
        if not isinstance(content, dict):
            raise ConfigError(f"{self.where}: {key} must be a mapping, got {_show(content)}; correct it")
        return ModelConfig(f"{self.where}: {key}", content)

    @property
    def is_without_dtype(self) -> bool:
        """Whether the file does not say the type of its weights."""
        return not self.has("dtype", "torch_dtype")

    def dtype(self) -> str:
        """Return bf16 or f16, in which vLLM computes by default: it takes bf16 for 32 bits, and without a type."""
        found = self._named_dtype("dtype", "torch_dtype")
        return "bf16" if found in (None, "f32") else found

    def state_dtype(self) -> str | None:
        """Return the type of recurrent states; None: the file does not say it."""
        keys = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        return self._named_dtype(*(key for key in keys if self.content.get(key) != "auto"))

    def _named_dtype(self, *keys: str) -> str | None:
        for key in keys:
            value = self.content.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise ConfigError(
                        f"{self.where}: {key} must be text, such as bfloat16, got {_show(value)}"
                    )
                return read_dtype(f"{self.where}: {key}", value)
        return None

    @property
    def model_type(self) -> str:
        """Value of `model_type` without the suffix of language models in multimodal ones."""
        named = self.content.get("model_type")
        if named is not None and not isinstance(named, str):
            raise ConfigError(f"{self.where}: model_type must be text, got {_show(named)}; correct it")
        return (named or "").removesuffix("_text")


def read_dtype(where: str, name: str) -> str:
    """Return bf16, f16 or f32 for a name of it. ConfigError for another type."""
    key = name.removeprefix("torch.").lower()
    if key not in DTYPES:
        raise ConfigError(f"{where}: {name!r} is not known; known are {', '.join(DTYPES)}")
    return DTYPES[key]


def _show(value: object) -> str:
    """Return the value as Python writes it, cut to a length that a message has room for."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
