"""Reads an `Architecture` from the `config.json` of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture, gated_delta_states
from understudy.timing.layer_pattern import layer_kinds, shared_layers, window_tokens
from understudy.timing.model_config import ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

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


def read_architecture(path: Path) -> Architecture:
    """Read the `config.json` at `path`. ConfigError names the file and the invalid key."""
    config = ModelConfig.read(path)
    named = config.content.get("_name_or_path")
    return _Reader(config).read(str(named) if named else path.parent.name or str(path))


class _Reader:
    """Reads the keys of one `config.json`."""

    def __init__(self, config: ModelConfig) -> None:
        self.where = config.where
        self.config = config

    def read(self, name: str) -> Architecture:
        self._reject_unknown_type()
        kinds = self._read_kinds()
        config = self.config
        layers = config.num_layers()
        heads = config.number("num_attention_heads")
        hidden = config.number("hidden_size")
        experts = config.optional(
            "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", least=0
        )
        try:
            return Architecture(
                name=name,
                num_layers=layers,
                hidden_size=hidden,
                num_heads=heads,
                kv_heads=config.number("num_key_value_heads", default=heads),
                head_dim=config.head_dim(heads),
                vocab_size=config.number("vocab_size"),
                tied_head=config.switch("tie_word_embeddings", default=False),
                shared_layers=shared_layers(config, layers),
                **self._windows(kinds),
                **self._states(kinds, hidden),
                **(self._experts(experts, layers) if experts else self._dense()),
                **self._types(),
            )
        except ConfigError as error:
            if str(error).startswith(self.where):
                raise
            raise ConfigError(f"{self.where}: {str(error).removeprefix(f'{name}: ')}") from error

    def _read_kinds(self) -> list[str]:
        """Return the kind of each layer. ConfigError for kinds whose times are not known."""
        config = self.config
        if config.has("kv_lora_rank"):
            raise ConfigError(
                f"{self.where}: kv_lora_rank: latent attention (MLA) is not supported yet; give measured times instead"
            )
        kinds = layer_kinds(config)
        named = set(kinds)
        if (
            ("state" in named and not config.has("linear_num_value_heads"))
            or "" in named
            or config.has("index_head_dim", "state_size", "mamba_d_state")
        ):
            raise ConfigError(
                f"{self.where}: only layers of full or sliding attention and of gated delta net are supported; "
                "give measured times instead"
            )
        if {"window", "chunk"} <= named:
            raise ConfigError(
                f"{self.where}: layers with windows next to layers with chunks are not supported; give measured times "
                "instead"
            )
        return kinds

    def _reject_unknown_type(self) -> None:
        kind = self.config.model_type or "llama"
        if kind in _DECODERS or self.config.has("kv_lora_rank"):
            return
        self._read_kinds()  # layers with states are refused as such: another type would not describe them
        raise ConfigError(
            f"{self.where}: model_type {kind!r} is not known; if its layers equal those of a known type (llama, "
            "qwen3_moe, …), give a copy of the file with that type"
        )

    def _windows(self, kinds: list[str]) -> dict[str, Any]:
        """Return the number of layers with windows or chunks, and the tokens of one."""
        if windows := kinds.count("window"):
            return {"window_layers": windows, "window_tokens": window_tokens(self.config)}
        if chunks := kinds.count("chunk"):
            return {"window_layers": chunks, "window_tokens": self.config.number("attention_chunk_size")}
        return {}

    def _states(self, kinds: list[str], hidden: int) -> dict[str, Any]:
        """Return the states of gated delta net: a matrix per value head, and the last inputs of a convolution."""
        config = self.config
        if "state" not in kinds:
            return {}
        heads, size = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
        key_size = config.number("linear_key_head_dim")
        return gated_delta_states(
            kinds.count("state"),
            hidden,
            heads,
            config.number("linear_num_key_heads") * key_size,
            heads * size,
            key_size,
            config.number("linear_conv_kernel_dim"),
            width=4 if config.state_dtype() == "f32" else 2,
        )

    def _dense(self) -> dict[str, Any]:
        return {"intermediate_size": self.config.number("intermediate_size")}

    def _experts(self, experts: int, layers: int) -> dict[str, Any]:
        config = self.config
        size = config.optional(
            "moe_intermediate_size", "expert_intermediate_size", "intermediate_size", least=0
        )
        chosen = config.optional(
            "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk", least=0
        )
        if size is None or chosen is None:
            missing = "moe_intermediate_size" if size is None else "num_experts_per_tok"
            raise ConfigError(f"{self.where}: {missing} is missing; add it to the file")
        shared = config.optional("shared_expert_intermediate_size", least=0)
        is_llama_4 = config.model_type == "llama4"
        if shared is None and is_llama_4:  # one, as wide as the routed ones; its files have no key for it
            shared = size
        elif shared is None:
            shared = size * (config.optional("n_shared_experts", "num_shared_experts", least=0) or 0)
        dense = config.optional("first_k_dense_replace", least=0)
        if not dense and config.has("mlp_only_layers"):
            dense = len(config.listed("mlp_only_layers", int, "numbers of layers"))
        dense = dense or 0
        every = config.optional("decoder_sparse_step", "interleave_moe_layer_step", least=0) or 1
        dense += max(layers - dense, 0) * (every - 1) // every
        width = "intermediate_size_mlp" if is_llama_4 else "intermediate_size"  # of layers without experts
        return {
            "num_experts": experts,
            "experts_per_token": chosen,
            "expert_size": size,
            "shared_expert_size": shared,
            "dense_layers": dense,
            "intermediate_size": config.number(width) if dense else 0,
        }

    def _types(self) -> dict[str, Any]:
        quantised = self.config.content.get("quantization_config")
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
