"""Shape of a dense Qwen3 model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.checks import read_settings
from understudy.errors import ConfigError
from understudy.kv import KvLayout
from understudy.kv.counts import count

ARCHITECTURE = "Qwen3ForCausalLM"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Keys that do not describe the shape, or that transformers writes for every model.
_IGNORED = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "name_or_path",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "sliding_window",
    "transformers_version",
    "use_cache",
}
# Keys with the only values that this engine supports.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "pretraining_tp": (1,),
    "mlp_bias": (False,),
}


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """Sizes and limits of the network. `dtype` is that of weights and KV."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "kv_heads", "head_dim"):
            count(field, getattr(self, field), 1, ConfigError)
        count("vocab_size", self.vocab_size, 1, ConfigError)
        count("max_positions", self.max_positions, 1, ConfigError)
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_key_value_heads={self.kv_heads} does not divide num_attention_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even, because rotary halves are paired")
        if not (self.rope_theta > 0 and self.norm_eps > 0):
            raise ConfigError("rope_theta and rms_norm_eps must be positive")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @classmethod
    def from_file(cls, path: str | Path) -> Qwen3Config:
        """Read a `config.json`, or that of a folder with its `generation_config.json`. ConfigError names the key."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        content = read_settings(path / "config.json" if path.is_dir() else path)
        config = cls.from_dict(content)
        generation = folder / "generation_config.json"
        if not generation.exists():
            return config
        return replace(
            config, eos_token_ids=_ids(read_settings(generation).get("eos_token_id")) or config.eos_token_ids
        )

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Qwen3Config:
        """Read the keys of a `config.json`. ConfigError for another architecture or an unsupported key."""
        named = content.get("architectures") or [content.get("model_type")]
        if ARCHITECTURE not in named and "qwen3" not in named:
            raise ConfigError(f"architectures={named}: not supported; only {ARCHITECTURE} (dense Qwen3) is")
        rest = {key: value for key, value in content.items() if key not in _IGNORED}
        rope = rest.pop("rope_parameters", None) or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(
                f"rope_parameters.rope_type={rope['rope_type']!r} is not supported; only default is"
            )
        layers = rest.pop("layer_types", None) or ()
        if any(kind != "full_attention" for kind in layers):
            raise ConfigError("layer_types: only full_attention is supported")
        for key, allowed in _ONLY.items():
            if (value := rest.pop(key, allowed[0])) not in allowed:
                raise ConfigError(f"{key}={value!r} is not supported; only {allowed[0]!r} is")

        def take(key: str, *default: Any) -> Any:
            if key in rest:
                return rest.pop(key)
            if default:
                return default[0]
            raise ConfigError(f"{key} is missing")

        heads = take("num_attention_heads")
        hidden = take("hidden_size")
        given = rest.pop("dtype", None) or rest.pop("torch_dtype", None) or "bfloat16"
        rest.pop("torch_dtype", None)
        config = cls(
            hidden_size=hidden,
            intermediate_size=take("intermediate_size"),
            num_layers=take("num_hidden_layers"),
            num_heads=heads,
            kv_heads=take("num_key_value_heads", heads),
            head_dim=take("head_dim", hidden // heads),
            vocab_size=take("vocab_size"),
            max_positions=take("max_position_embeddings"),
            rope_theta=float(take("rope_theta", rope.get("rope_theta", 1e6))),
            norm_eps=float(take("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(take("tie_word_embeddings", False)),
            eos_token_ids=_ids(take("eos_token_id", None)),
            dtype=str(given).removeprefix("torch."),
        )
        if rest:
            raise ConfigError(
                f"{sorted(rest)[0]} is not a key that this engine knows; remove it or use another engine"
            )
        return config

    @property
    def attention_width(self) -> int:
        """Width of all query heads together; not the hidden size."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    def layout(self, page_size: int) -> KvLayout:
        """Return the layout of its KV in pages of `page_size` tokens."""
        return KvLayout(page_size, self.num_layers, self.kv_heads, self.head_dim, DTYPE_BYTES[self.dtype])

    def shard(self, ranks: int) -> Qwen3Config:
        """Return the shape of one of `ranks` tensor-parallel ranks: a share of the heads and of the MLP."""
        for field in ("num_heads", "kv_heads", "intermediate_size"):
            if getattr(self, field) % ranks:
                raise ConfigError(
                    f"tensor_parallel_size={ranks} does not divide {field}={getattr(self, field)}"
                )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            kv_heads=self.kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
        )

    @property
    def parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        attention = self.hidden_size * (self.attention_width * 2 + self.kv_width * 2) + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = 1 if self.tied_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * DTYPE_BYTES[self.dtype]


def _known(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False
) -> Qwen3Config:
    return Qwen3Config(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        128,
        151936,
        40960,
        tied_embeddings=tied,
        eos_token_ids=(151645,),
    )


SHAPES = {
    "Qwen3-0.6B": _known(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-1.7B": _known(2048, 6144, 28, 16, 8, tied=True),
    "Qwen3-4B": _known(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-8B": _known(4096, 12288, 36, 32, 8),
    "Qwen3-14B": _known(5120, 17408, 40, 40, 8),
    "Qwen3-32B": _known(5120, 25600, 64, 64, 8),
}
"""Published dense sizes, for random weights without a checkpoint."""


def find_config(model: str) -> Qwen3Config:
    """Return a published shape by name (also `Qwen/Qwen3-4B`), or the configuration at a path."""
    path = Path(model)
    if path.exists():
        return Qwen3Config.from_file(path)
    shape = SHAPES.get(model.rpartition("/")[2])
    if shape is None:
        raise ConfigError(f"model {model!r} is neither a path nor one of {', '.join(SHAPES)}")
    return shape


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(
        count("eos_token_id", item, 0, ConfigError)
        for item in (value if isinstance(value, list) else [value])
    )
