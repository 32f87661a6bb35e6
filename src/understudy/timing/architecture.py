"""`Architecture`: the dimensions of a transformer that set its step times."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.attention import Indexer, LatentAttention  # noqa: TC001  (msgspec reads the annotations)
from understudy.timing.weight_types import weight_type

Narrow = Literal["all", "mlp", "experts"]


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
    latent: LatentAttention | None = None
    """Latent attention (MLA), whose cache has no heads; `kv_heads` is 1 and `head_dim` that of an expanded key."""
    indexer: Indexer | None = None
    """Indexer that selects tokens for sparse attention; its KV is stored and counted, its time is not."""
    full_kv_heads: int = 0
    """KV heads of layers with full attention next to windows; 0: as many as those with windows."""
    full_head_dim: int = 0
    """Their size of a head; 0: equal."""
    gated_attention: bool = False
    """Whether attention has an output gate, as wide as the queries."""
    mlp_layers: int = 0
    """Layers with an MLP or experts; 0: all. Nemotron has them between layers of attention and of states."""
    mlp_matrices: int = 3
    """Matrices of an MLP and of an expert: 3 if gated, else 2."""
    expert_input: int = 0
    """Width of a routed expert's input, if a projection narrows it; 0: the hidden size."""
    int4_group: int = 128
    """Weights that share a scale in int4."""
    narrow: Narrow = "all"
    """Weights that a 4-bit type narrows: all, those of MLPs, or those of routed experts; others stay in bf16."""

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
        return msgspec.structs.replace(
            self, name="", weights="bf16", dense_weights=None, tied_head=False, int4_group=128, narrow="all"
        )

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.mixed_layers - self.dense_layers if self.num_experts else 0

    @property
    def mixed_layers(self) -> int:
        """Number of layers with an MLP or experts."""
        return self.mlp_layers or self.num_layers

    @property
    def full_layers(self) -> int:
        """Number of layers with full attention."""
        return self.num_layers - self.window_layers - self.state_layers

    def attention_sizes(self, *, is_full: bool) -> tuple[int, int]:
        """Return KV heads and size of a head of layers with full attention, or with windows."""
        if not is_full:
            return self.kv_heads, self.head_dim
        return self.full_kv_heads or self.kv_heads, self.full_head_dim or self.head_dim

    def attention_parameters(self, *, is_full: bool) -> int:
        """Return the parameters of one layer's attention: queries, keys, values, output gate and output."""
        if self.latent is not None:
            own = self.latent.head_parameters(self.hidden_size, self.num_heads)
            return own + self.latent.whole_parameters(self.hidden_size)
        kv_heads, size = self.attention_sizes(is_full=is_full)
        gate = self.hidden_size * size * self.num_heads if self.gated_attention else 0
        return self.hidden_size * size * 2 * (self.num_heads + kv_heads) + gate

    @property
    def mixer_parameters(self) -> int:
        """Parameters of attention, states and indexers of all layers."""
        full = self.full_layers * self.attention_parameters(is_full=True)
        windows = self.window_layers * self.attention_parameters(is_full=False)
        return full + windows + self.state_layers * self.state_parameters + self.indexer_parameters

    @property
    def indexer_parameters(self) -> int:
        """Parameters of all indexers."""
        if self.indexer is None:
            return 0
        inputs = self.hidden_size if self.latent is None else self.latent.query_rank or self.hidden_size
        return self.indexer.layers * self.indexer.parameters(self.hidden_size, inputs)

    @property
    def whole_parameters(self) -> int:
        """Linear parameters that every tensor-parallel GPU has whole: those that need no head."""
        if self.latent is None:
            return 0
        return self.num_layers * self.latent.whole_parameters(self.hidden_size) + self.indexer_parameters

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers that every token uses: without routed experts and head."""
        wide = self.mlp_matrices * self.hidden_size
        dense = (self.mixed_layers - self.expert_layers) * wide * self.intermediate_size
        routed = (
            self.expert_layers
            * self.hidden_size
            * (self.mlp_matrices * self.shared_expert_size + self.num_experts + 2 * self.expert_input)
        )
        return self.mixer_parameters + dense + routed

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer."""
        return self.mlp_matrices * (self.expert_input or self.hidden_size) * self.expert_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the projection to the vocabulary."""
        return self.vocab_size * self.hidden_size

    def linear_type(self, weights: str | None) -> str:
        """Return the type of linear layers for the given type of weights (None: the default)."""
        if self.dense_weights is not None:
            return self.dense_weights
        kind = weight_type(self.weights if weights is None else weights)
        return "bf16" if self.narrow == "experts" and kind.is_narrow else kind.name

    def mixer_type(self, weights: str | None) -> str:
        """Return the type of attention and states, which may be wider than other linear layers."""
        kind = weight_type(self.linear_type(weights))
        return "bf16" if self.narrow == "mlp" and kind.is_narrow else kind.name

    def bytes_per_parameter(self, kind: str) -> float:
        """Return the bytes of a weight of a type, with its share of the scales."""
        found = weight_type(kind)
        return 0.5 + 2 / self.int4_group if found.name == "int4" else found.bytes

    @property
    def stored_expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.expert_layers * self.num_experts * self.expert_parameters

    def linear_bytes(self, weights: str | None = None) -> float:
        """Return the bytes of all linear layers but routed experts and head."""
        linear, mixer = self.linear_type(weights), self.mixer_type(weights)
        if linear == mixer:
            return self.linear_parameters * self.bytes_per_parameter(linear)
        rest = self.linear_parameters - self.mixer_parameters
        return self.mixer_parameters * self.bytes_per_parameter(mixer) + rest * self.bytes_per_parameter(
            linear
        )

    def expert_bytes(self, weights: str | None = None) -> float:
        """Return the bytes of all routed experts."""
        kind = weight_type(self.weights if weights is None else weights).name
        return self.stored_expert_parameters * self.bytes_per_parameter(kind)

    def weight_bytes(self, weights: str | None = None) -> int:
        """Return the bytes of the model: linear layers and experts in their types, embedding and head in bf16."""
        head = self.head_parameters * 2 * (1 if self.tied_head else 2)
        return int(self.linear_bytes(weights) + self.expert_bytes(weights) + head)


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


def mamba2_states(
    layers: int, hidden: int, heads: int, size: int, groups: int, state: int, kernel: int, width: int = 4
) -> dict[str, Any]:
    """Return sizes and parameters of the states of `layers` layers of Mamba 2.

    `size` are the channels of a head and `state` the elements that each keeps; `width` are the bytes of one.
    """
    inner = heads * size
    channels = inner + 2 * groups * state
    return {
        "state_layers": layers,
        "state_elements": inner * state + (kernel - 1) * channels,
        "state_bytes": inner * state * width + (kernel - 1) * channels * 2,
        "state_parameters": hidden * (inner + channels + heads) + inner * hidden + kernel * channels,
    }
