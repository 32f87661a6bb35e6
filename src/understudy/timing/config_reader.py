"""Reads an `Architecture` from the `config.json` of a model."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture
from understudy.timing.layer_pattern import shared_layers
from understudy.timing.mixer_reader import read_attention, read_kinds, read_states, read_windows
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
    *(
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        "glm_moe_dsa",
        "glm4_moe_lite",
        "ministral3",
        "qwen3_5",
        "qwen3_5_moe",
    ),
    *("gemma4", "minimax_m3", "minimax_m3_vl", "nemotron_h"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "dots1", "bailing_moe"),
}
"""Values of `model_type` whose layers are attention and a gated MLP, or experts with gated MLPs."""


def read_architecture(path: Path) -> Architecture:
    """Read the `config.json` at `path`. ConfigError names the file and the invalid key."""
    config = ModelConfig.read(path)
    named = config.content.get("_name_or_path")
    return architecture_of(config, str(named) if named else path.parent.name or str(path))


def architecture_of(config: ModelConfig, name: str) -> Architecture:
    """Return the architecture that the keys of a model describe. ConfigError names the invalid key."""
    return _Reader(config).read(name)


class _Reader:
    """Reads the keys of one `config.json`."""

    def __init__(self, config: ModelConfig) -> None:
        self.where = config.where
        self.config = config

    def read(self, name: str) -> Architecture:
        self._reject_unknown_type()
        config = self.config
        kinds = read_kinds(config)
        hidden = config.number("hidden_size")
        experts = config.optional(
            "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", least=0
        )
        try:
            mixers = sum(1 for kind in kinds if kind)
            layers = mixers if "" in kinds else config.num_layers(default=len(kinds))
            return Architecture(
                name=name,
                num_layers=layers,
                hidden_size=hidden,
                vocab_size=config.number("vocab_size"),
                tied_head=config.switch("tie_word_embeddings", default=False),
                shared_layers=shared_layers(config, layers),
                **read_attention(config, kinds),
                **read_windows(config, kinds),
                **read_states(config, kinds, hidden),
                **(self._experts(experts, layers) if experts else self._dense()),
                **self._between(kinds),
                **self._types(has_experts=bool(experts), has_states="state" in kinds),
            )
        except ConfigError as error:
            if str(error).startswith(self.where):
                raise
            raise ConfigError(f"{self.where}: {str(error).removeprefix(f'{name}: ')}") from error

    def _reject_unknown_type(self) -> None:
        kind = self.config.model_type or "llama"
        if kind in _DECODERS:
            return
        read_kinds(
            self.config
        )  # layers with states are refused as such: another type would not describe them
        raise ConfigError(
            f"{self.where}: model_type {kind!r} is not known; if its layers equal those of a known type (llama, "
            "qwen3_moe, …), give a copy of the file with that type"
        )

    def _between(self, kinds: list[str]) -> dict[str, Any]:
        """Return the MLPs of a model that has them between its layers of attention and of states."""
        if "" not in kinds:
            return {}
        if self.config.content.get("mlp_hidden_act", "relu2") != "relu2":
            raise ConfigError(
                f"{self.where}: mlp_hidden_act: only relu2, without a gate, is known; correct it"
            )
        latent = self.config.optional("moe_latent_size", least=0) or 0
        return {"mlp_layers": kinds.count(""), "mlp_matrices": 2, "expert_input": latent}

    def _dense(self) -> dict[str, Any]:
        for key in ("hidden_size_per_layer_input", "use_double_wide_mlp"):
            if self.config.content.get(key):
                raise ConfigError(
                    f"{self.where}: {key}: embeddings and MLPs by layer (Gemma 4 E2B, E4B) are not timed; give "
                    "measured times instead"
                )
        return {"intermediate_size": self.config.number("intermediate_size")}

    def _experts(self, experts: int, layers: int) -> dict[str, Any]:
        config = self.config
        size = config.optional(
            "moe_intermediate_size", "expert_intermediate_size", "intermediate_size", least=0
        )
        chosen = config.optional(
            "num_experts_per_tok",
            "experts_per_token",
            "num_experts_per_token",
            "moe_topk",
            "top_k_experts",
            least=0,
        )
        if size is None or chosen is None:
            missing = "moe_intermediate_size" if size is None else "num_experts_per_tok"
            raise ConfigError(f"{self.where}: {missing} is missing; add it to the file")
        shared = config.optional(
            "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", least=0
        )
        if config.model_type == "gemma4":  # every layer has an MLP next to its experts
            shared = config.number("intermediate_size")
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
        if self.config.model_type == "nemotron_h":
            dense = str(config.content.get("hybrid_override_pattern", "")).count("-")
            dense += list(config.content.get("layers_block_type") or ()).count("mlp")
        width = "intermediate_size_mlp" if is_llama_4 else "intermediate_size"  # of layers without experts
        if config.has("dense_intermediate_size"):
            width = "dense_intermediate_size"
        return {
            "num_experts": experts,
            "experts_per_token": chosen,
            "expert_size": size,
            "shared_expert_size": shared,
            "dense_layers": dense,
            "intermediate_size": config.number(width) if dense else 0,
        }

    def _types(self, *, has_experts: bool, has_states: bool) -> dict[str, Any]:
        """Return the type of the weights, and which of them checkpoints in 4 bits narrow."""
        config = self.config
        narrow: dict[str, Any] = {}
        if has_experts and (config.has("kv_lora_rank") or has_states or config.model_type == "gemma4"):
            # So do those of NVIDIA, Moonshot and Google, but for NVIDIA's of Nemotron.
            narrow = {} if config.model_type == "nemotron_h" else {"narrow": "experts"}
        elif config.model_type == "gemma4":
            narrow = {"narrow": "mlp"}
        quantised = config.content.get("quantization_config")
        if not isinstance(quantised, dict):
            return narrow
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
        group = re.search(r'"group_size": (\d+)', text)
        if kind == "int4" and group is not None and int(group[1]):
            narrow["int4_group"] = int(group[1])
        return {"weights": kind, **narrow, **({"dense_weights": "bf16"} if kind == "mxfp4" else {})}
