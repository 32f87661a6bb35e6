"""`Architecture`: the dimensions of a transformer that set its step times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.weight_types import weight_type


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
    """Window of sliding-attention layers, or chunk of local attention; 0 without such layers."""
    window_layers: int = 0
    shared_layers: int = 0
    """Last layers that read the KV cache of earlier ones and have none of their own."""
    state_layers: int = 0
    """Layers that keep a recurrent state instead of keys and values."""
    state_elements: int = 0
    """Elements of one such layer's state."""
    state_bytes: int = 0
    """Bytes of one such layer's state, read and written once per sequence and step; 0: two per element."""
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
        from understudy.timing.config_reader import read_architecture

        return read_architecture(path)


_KINDS = r"w-mxfp4-a-fp8|fp8|nvfp4|mxfp4|fp4|bf16|fp16|awq|gptq|int4|int8|w4a16|w8a8|dynamic|block|kv|quantized\.\w+"
_ENDINGS = re.compile(rf"(-(instruct|base|chat|thinking|it|hf|v[01]\.\d|\d+k|\d{{4}}|{_KINDS}))+$")


def plain_name(model: str) -> str:
    """Return a model's name without owner, variant, date and precision, in lower case.

    meta-llama/Llama-3.1-8B-Instruct-FP8 is llama-3.1-8b.
    """
    return _ENDINGS.sub("", re.sub("^meta-(?=llama)", "", model.rpartition("/")[2].lower()))


def gated_delta_states(
    layers: int, hidden: int, heads: int, keys: int, values: int, key_size: int, kernel: int, width: int = 2
) -> dict[str, Any]:
    """Return sizes and parameters of the states of `layers` layers of gated delta net.

    `keys` and `values` are the channels of all key and value heads; `kernel` is the width of the convolution, whose
    inputs have 16 bits; `width` are the bytes of an element of the recurrent state.
    """
    channels = 2 * keys + values
    return {
        "state_layers": layers,
        "state_elements": values * key_size + (kernel - 1) * channels,
        "state_bytes": values * key_size * width + (kernel - 1) * channels * 2,
        "state_parameters": hidden * (channels + values + 2 * heads) + values * hidden + kernel * channels,
    }


def _name_of(path: Path, content: dict[str, Any]) -> str:
    named = content.get("_name_or_path")
    return str(named) if named else path.parent.name or str(path)
