"""`Architecture`: the dimensions of a transformer that set its step times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from understudy.checks import read_settings
from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.weight_types import weight_type

_DECODERS = {
    *("llama", "llama4", "mistral", "mistral3", "ministral", "mixtral", "gpt_oss", "minimax_m2", "deepseek"),
    *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"),
    *("gemma", "gemma2", "gemma3", "phi3", "phimoe", "granite", "granitemoe", "glm", "glm4", "glm4_moe"),
    *(
        "olmo",
        "qwen3_next",
        "olmo2",
        "olmo3",
        "olmoe",
        "internlm",
        "internlm2",
        "internlm3",
        "cohere",
        "cohere2",
        "stablelm",
    ),
    *(
        "yi",
        "baichuan",
        "exaone",
        "exaone4",
        "solar",
        "aquila",
        "seed_oss",
        "smollm3",
        "mimo",
        "arcee",
        "apertus",
    ),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "dots1", "bailing_moe"),
}
"""Values of `model_type` whose layers are attention and a gated MLP, or experts with gated MLPs."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder: an embedding, layers of attention and a gated MLP (or experts), and a head."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int = 0
    """Intermediate size of a dense layer's MLP; 0 if every layer has experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Intermediate size of one expert."""
    shared_expert_size: int = 0
    """Total intermediate size of the shared experts, which process every token."""
    dense_layers: int = 0
    """Layers without experts, in a model with experts."""
    window_tokens: int = 0
    """Window of sliding-attention layers; 0 without such layers."""
    window_layers: int = 0
    state_layers: int = 0
    """Layers that keep a recurrent state instead of keys and values."""
    state_elements: int = 0
    """Elements of one such layer's state: read and written once per sequence and step."""
    state_parameters: int = 0
    """Parameters of one such layer, without its MLP."""
    tied_head: bool = False
    """Whether the head shares the embedding's weights; it takes no memory, but is still read."""
    weights: str = "bf16"
    """Default type of the weights."""
    dense_weights: str | None = None
    """Type of all weights but the experts', if it differs."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "kv_heads", "head_dim", "vocab_size"):
            count(f"{self.name}: {name}", getattr(self, name), 1, ConfigError)
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"{self.name}: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.kv_heads}"
            )
        if self.num_experts:
            count(f"{self.name}: experts_per_token", self.experts_per_token, 1, ConfigError)
            count(f"{self.name}: expert_size", self.expert_size, 1, ConfigError)
            if self.experts_per_token > self.num_experts:
                raise ConfigError(
                    f"{self.name}: experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}"
                )
        if self.dense_layers > self.num_layers or self.window_layers + self.state_layers > self.num_layers:
            raise ConfigError(
                f"{self.name}: more layers of one kind than num_hidden_layers={self.num_layers}"
            )
        if (not self.num_experts or self.dense_layers) and self.intermediate_size < 1:
            raise ConfigError(f"{self.name}: intermediate_size must be an int of at least 1")
        if self.state_layers and not (self.state_elements and self.state_parameters):
            raise ConfigError(f"{self.name}: layers with states need their size; give both")
        if bool(self.window_layers) != bool(self.window_tokens):
            raise ConfigError(
                f"{self.name}: sliding_window and layers of sliding attention need each other; give both or none"
            )

    @property
    def shape(self) -> Architecture:
        """The dimensions without name and weight types."""
        return msgspec.structs.replace(self, name="", weights="bf16", dense_weights=None, tied_head=False)

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers - self.dense_layers if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: projections to queries, keys and values, and the output."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.kv_heads)

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers that every token uses: without routed experts and head."""
        dense = (self.num_layers - self.expert_layers) * 3 * self.hidden_size * self.intermediate_size
        routed = self.expert_layers * self.hidden_size * (3 * self.shared_expert_size + self.num_experts)
        attention = (self.num_layers - self.state_layers) * self.attention_parameters
        return attention + self.state_layers * self.state_parameters + dense + routed

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the projection to the vocabulary."""
        return self.vocab_size * self.hidden_size

    def linear_type(self, weights: str | None) -> str:
        """Return the type of linear layers for the given type of weights (None: the default)."""
        if self.dense_weights is not None:
            return self.dense_weights
        return weight_type(self.weights if weights is None else weights).name

    def weight_bytes(self, weights: str | None = None) -> int:
        """Return the bytes of the model: linear layers and experts in their types, embedding and head in bf16."""
        expert_type = weight_type(self.weights if weights is None else weights)
        linear = self.linear_parameters * weight_type(self.linear_type(weights)).bytes
        experts = self.expert_layers * self.num_experts * self.expert_parameters * expert_type.bytes
        return int(linear + experts + self.head_parameters * 2 * (1 if self.tied_head else 2))

    @classmethod
    def find(cls, model: str) -> Architecture:
        """Find a model by name, or read the `config.json` at a path or in a folder.

        ConfigError names an unknown model, a missing key, or an unsupported architecture (latent attention).
        """
        path = Path(model)
        if path.is_dir():
            return cls.from_config(path / "config.json")
        if path.suffix == ".json":
            return cls.from_config(path)
        from understudy.timing.known_models import known_model

        return known_model(model)

    @classmethod
    def from_config(cls, path: Path) -> Architecture:
        """Read a Hugging Face `config.json`. ConfigError names the file and the invalid key."""
        content = read_settings(path, "model ")
        text = content.get("text_config")  # multimodal models have their language model here
        if isinstance(text, dict):
            content = {"quantization_config": content.get("quantization_config"), **text}
        return _Reader(f"model {path}", content).read(_name_of(path, content))


_KINDS = r"w-mxfp4-a-fp8|fp8|nvfp4|mxfp4|fp4|bf16|fp16|awq|gptq|int4|int8|w4a16|w8a8|dynamic|block|kv|quantized\.\w+"
_ENDINGS = re.compile(rf"(-(instruct|base|chat|thinking|it|hf|v[01]\.\d|\d+k|\d{{4}}|{_KINDS}))+$")


def plain_name(model: str) -> str:
    """Return a model's name without owner, variant, date and precision, in lower case.

    meta-llama/Llama-3.1-8B-Instruct-FP8 is llama-3.1-8b.
    """
    return _ENDINGS.sub("", re.sub("^meta-(?=llama)", "", model.rpartition("/")[2].lower()))


def gated_delta_states(
    layers: int, hidden: int, heads: int, keys: int, values: int, key_size: int, kernel: int
) -> dict[str, Any]:
    """Return `state_layers`, `state_elements` and `state_parameters` of `layers` layers of gated delta net.

    `keys` and `values` are the channels of all key and value heads; `kernel` is the width of the convolution.
    """
    channels = 2 * keys + values
    return {
        "state_layers": layers,
        "state_elements": values * key_size + (kernel - 1) * channels,
        "state_parameters": hidden * (channels + values + 2 * heads) + values * hidden + kernel * channels,
    }


def _name_of(path: Path, content: dict[str, Any]) -> str:
    named = content.get("_name_or_path")
    return str(named) if named else path.parent.name or str(path)


class _Reader:
    """Reads the keys of one `config.json`."""

    def __init__(self, where: str, config: dict[str, Any]) -> None:
        self.where = where
        self.config = config

    def read(self, name: str) -> Architecture:
        self._reject_unsupported()
        config = self.config
        layers = self._number("num_hidden_layers")
        heads = self._number("num_attention_heads")
        hidden = self._number("hidden_size")
        if config.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"{self.where}: head_dim is missing, and hidden_size={hidden} is not a multiple of "
                f"num_attention_heads={heads}"
            )
        experts = self._first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        states = self._gated_delta_states(layers, hidden) if "linear_num_value_heads" in config else {}
        windows = self._windows(layers)
        try:
            return Architecture(
                name=name,
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                kv_heads=self._optional("num_key_value_heads", heads),
                head_dim=self._optional("head_dim", hidden // heads),
                vocab_size=self._number("vocab_size"),
                tied_head=bool(config.get("tie_word_embeddings", False)),
                window_tokens=self._number("sliding_window") if windows else 0,
                window_layers=windows,
                **states,
                **(self._experts(experts, layers) if experts else self._dense()),
                **self._types(),
            )
        except ConfigError as error:
            if str(error).startswith(self.where):
                raise
            raise ConfigError(f"{self.where}: {str(error).removeprefix(f'{name}: ')}") from error

    def _reject_unsupported(self) -> None:
        config = self.config
        kind = str(config.get("model_type", "llama")).removesuffix("_text")
        if kind not in _DECODERS and config.get("kv_lora_rank") is None:
            raise ConfigError(
                f"{self.where}: model_type {kind!r} is not known; if its layers equal those of a known type (llama, "
                "qwen3_moe, …), give a copy of the file with that type"
            )
        if config.get("kv_lora_rank") is not None:
            raise ConfigError(
                f"{self.where}: kv_lora_rank: latent attention (MLA) is not supported yet; give measured times instead"
            )
        kinds = set(config.get("layer_types") or config.get("layers_block_type") or ())
        odd = kinds - {"full_attention", "sliding_attention", "attention", "chunked_attention"}
        if "linear_num_value_heads" in config:  # gated delta net
            odd -= {"linear_attention"}
        if odd or any(key in config for key in ("ssm_cfg", "state_size", "mamba_d_state", "index_head_dim")):
            raise ConfigError(
                f"{self.where}: only layers of full or sliding attention and of gated delta net are supported; "
                "give measured times instead"
            )
        if config.get("is_encoder_decoder"):
            raise ConfigError(f"{self.where}: is_encoder_decoder: encoders are not supported")

    def _gated_delta_states(self, layers: int, hidden: int) -> dict[str, Any]:
        """Return the states of gated delta net: a matrix per value head, and the last inputs of a convolution."""
        kinds = self.config.get("layer_types")
        period = self._optional("full_attention_interval", 4)
        full = sum(kind == "full_attention" for kind in kinds) if kinds else layers // period
        heads, size = self._number("linear_num_value_heads"), self._number("linear_value_head_dim")
        key_size = self._number("linear_key_head_dim")
        keys, values = self._number("linear_num_key_heads") * key_size, heads * size
        return gated_delta_states(
            layers - full, hidden, heads, keys, values, key_size, self._number("linear_conv_kernel_dim")
        )

    def _dense(self) -> dict[str, Any]:
        return {"intermediate_size": self._number("intermediate_size")}

    def _experts(self, experts: int, layers: int) -> dict[str, Any]:
        config = self.config
        size = self._first("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
        chosen = self._first("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
        if size is None or chosen is None:
            missing = "moe_intermediate_size" if size is None else "num_experts_per_tok"
            raise ConfigError(f"{self.where}: {missing} is missing")
        shared = self._first("shared_expert_intermediate_size")
        if shared is None:
            shared = size * (self._first("n_shared_experts", "num_shared_experts") or 0)
        dense = self._first("first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
        every = self._first("decoder_sparse_step", "interleave_moe_layer_step") or 1
        dense += (layers - dense) * (every - 1) // every
        return {
            "num_experts": experts,
            "experts_per_token": chosen,
            "expert_size": size,
            "shared_expert_size": shared,
            "dense_layers": dense,
            "intermediate_size": self._number("intermediate_size") if dense else 0,
        }

    def _types(self) -> dict[str, Any]:
        quantised = self.config.get("quantization_config")
        if not isinstance(quantised, dict):
            return {}
        method = str(quantised.get("quant_method", "")).lower()
        names = {"fp8": "fp8", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4", "fbgemm_fp8": "fp8"}
        text = json.dumps(quantised).lower()
        if method in names:
            kind = names[method]
        elif "nvfp4" in text:
            kind = "nvfp4"
        elif '"num_bits": 8' in text and '"type": "float"' in text:
            kind = "fp8"
        elif '"num_bits": 4' in text and '"type": "int"' in text:
            kind = "int4"
        else:
            raise ConfigError(
                f"{self.where}: quantization_config.quant_method {method!r} is not known; give --weight-dtype"
            )
        return {"weights": kind, **({"dense_weights": "bf16"} if kind == "mxfp4" else {})}

    def _windows(self, layers: int) -> int:
        config = self.config
        if not config.get("sliding_window") or config.get("use_sliding_window") is False:
            return 0
        kinds = config.get("layer_types")
        if kinds:
            if len(kinds) != layers:
                raise ConfigError(
                    f"{self.where}: layer_types has {len(kinds)} entries for num_hidden_layers={layers}"
                )
            return sum(kind == "sliding_attention" for kind in kinds)
        if pattern := self._first("sliding_window_pattern"):
            return layers - layers // pattern
        first = self._first("max_window_layers")
        return layers if first is None else max(layers - first, 0)

    def _number(self, key: str) -> int:
        if self.config.get(key) is None:
            raise ConfigError(f"{self.where}: {key} is missing")
        return count(f"{self.where}: {key}", self.config[key], 1, ConfigError)

    def _optional(self, key: str, default: int) -> int:
        return default if self.config.get(key) is None else self._number(key)

    def _first(self, *keys: str) -> int | None:
        for key in keys:
            if self.config.get(key) is not None:
                return count(f"{self.where}: {key}", self.config[key], 0, ConfigError)
        return None
