"""Architectures of known models, from the `config.json` of their repositories."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture, gated_delta_states, plain_name
from understudy.timing.config_reader import architecture_of
from understudy.timing.known_configs import CONFIGS
from understudy.timing.model_config import ModelConfig
from understudy.timing.names import name_key, unknown_name
from understudy.timing.weight_types import type_in_name

if TYPE_CHECKING:
    from collections.abc import Iterable


def _dense(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    window: tuple[int, int] = (0, 0),
) -> Architecture:
    return Architecture(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        intermediate_size=mlp,
        tied_head=tied,
        window_tokens=window[0],
        window_layers=window[1],
    )


def _experts(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    experts: tuple[int, int, int],
    vocab: int,
    *,
    head_dim: int = 128,
    shared: int = 0,
    dense: tuple[int, int] = (0, 0),
    window: tuple[int, int] = (0, 0),
    weights: str = "bf16",
    dense_weights: str | None = None,
    states: dict[str, Any] | None = None,
) -> Architecture:
    return Architecture(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        num_experts=experts[0],
        experts_per_token=experts[1],
        expert_size=experts[2],
        shared_expert_size=shared,
        dense_layers=dense[0],
        intermediate_size=dense[1],
        window_tokens=window[0],
        window_layers=window[1],
        weights=weights,
        dense_weights=dense_weights,
        **(states or {}),
    )


MODELS = {
    shape.name: shape
    for shape in (
        # name, layers, hidden, query heads, KV heads, MLP, vocabulary
        _dense("Llama-2-7B", 32, 4096, 32, 32, 11008, 32000),
        _dense("Llama-2-13B", 40, 5120, 40, 40, 13824, 32000),
        _dense("Llama-2-70B", 80, 8192, 64, 8, 28672, 32000),
        _dense("CodeLlama-7B", 32, 4096, 32, 32, 11008, 32016),
        _dense("CodeLlama-13B", 40, 5120, 40, 40, 13824, 32016),
        _dense("CodeLlama-34B", 48, 8192, 64, 8, 22016, 32000),
        _dense("CodeLlama-70B", 80, 8192, 64, 8, 28672, 32016),
        _dense("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256),
        _dense("Llama-3-70B", 80, 8192, 64, 8, 28672, 128256),
        _dense("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
        _dense("Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
        _dense("Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256),
        _dense("Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tied=True),
        _dense("Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, tied=True),
        _dense("Llama-3.3-70B", 80, 8192, 64, 8, 28672, 128256),
        _dense("Qwen2-7B", 28, 3584, 28, 4, 18944, 152064),
        _dense("Qwen2-72B", 80, 8192, 64, 8, 29568, 152064),
        _dense("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, head_dim=64, tied=True),
        _dense("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _dense("Qwen2.5-3B", 36, 2048, 16, 2, 11008, 151936, tied=True),
        _dense("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
        _dense("Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064),
        _dense("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
        _dense("Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
        _dense("Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True),
        _dense("Qwen3-1.7B", 28, 2048, 16, 8, 6144, 151936, tied=True),
        _dense("Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, tied=True),
        _dense("Qwen3-8B", 36, 4096, 32, 8, 12288, 151936),
        _dense("Qwen3-14B", 40, 5120, 40, 8, 17408, 151936),
        _dense("Qwen3-32B", 64, 5120, 64, 8, 25600, 151936),
        _dense("Mistral-7B", 32, 4096, 32, 8, 14336, 32768),
        _dense("Mistral-Nemo", 40, 5120, 32, 8, 14336, 131072),
        _dense("Mistral-Small-24B", 40, 5120, 32, 8, 32768, 131072),
        _dense("Mistral-Large", 88, 12288, 96, 8, 28672, 32768),
        _dense("Yi-34B", 60, 7168, 56, 8, 20480, 64000),
        _dense("Phi-3-mini", 32, 3072, 32, 32, 8192, 32064, head_dim=96),
        _dense("Phi-3-medium", 40, 5120, 40, 10, 17920, 32064),
        _dense("Phi-4", 40, 5120, 40, 10, 17920, 100352),
        _dense("Granite-3.1-8B", 40, 4096, 32, 8, 12800, 49155, tied=True),
        # window: tokens, and number of sliding layers
        _dense("Gemma-2-9B", 42, 3584, 16, 8, 14336, 256000, head_dim=256, tied=True, window=(4096, 21)),
        _dense("Gemma-2-27B", 46, 4608, 32, 16, 36864, 256000, tied=True, window=(4096, 23)),
        _dense("Gemma-3-4B", 34, 2560, 8, 4, 10240, 262208, head_dim=256, tied=True, window=(1024, 29)),
        _dense("Gemma-3-12B", 48, 3840, 16, 8, 15360, 262208, head_dim=256, tied=True, window=(1024, 40)),
        _dense("Gemma-3-27B", 62, 5376, 32, 16, 21504, 262208, tied=True, window=(1024, 52)),
        # experts: number, experts per token, size of one
        _experts("Mixtral-8x7B", 32, 4096, 32, 8, (8, 2, 14336), 32000),
        _experts("Mixtral-8x22B", 56, 6144, 48, 8, (8, 2, 16384), 32768),
        _experts("Qwen3-30B-A3B", 48, 2048, 32, 4, (128, 8, 768), 151936),
        _experts("Qwen3-235B-A22B", 94, 4096, 64, 4, (128, 8, 1536), 151936),
        _experts("Qwen3-Coder-480B-A35B", 62, 6144, 96, 8, (160, 8, 2560), 151936),
        _experts(
            "Qwen3-Next-80B-A3B",
            48,
            2048,
            16,
            2,
            (512, 10, 512),
            151936,
            head_dim=256,
            shared=512,
            states=gated_delta_states(36, 2048, 32, 2048, 4096, 128, 4),
        ),
        _experts(
            "Llama-4-Scout-17B-16E",
            48,
            5120,
            40,
            8,
            (16, 1, 8192),
            202048,
            shared=8192,
            window=(8192, 36),
        ),
        _experts(
            "Llama-4-Maverick-17B-128E",
            48,
            5120,
            40,
            8,
            (128, 1, 8192),
            202048,
            shared=8192,
            dense=(24, 16384),
            window=(8192, 36),
        ),
        _experts("GLM-4.5", 92, 5120, 96, 8, (160, 8, 1536), 151552, shared=1536, dense=(3, 12288)),
        _experts("GLM-4.6", 92, 5120, 96, 8, (160, 8, 1536), 151552, shared=1536, dense=(3, 12288)),
        _experts("GLM-4.5-Air", 46, 4096, 96, 8, (128, 8, 1408), 151552, shared=1408, dense=(1, 10944)),
        _experts("GLM-4.7", 92, 5120, 96, 8, (160, 8, 1536), 151552, shared=1536, dense=(3, 12288)),
        _experts("MiniMax-M2", 62, 3072, 48, 8, (256, 8, 1536), 200064, weights="fp8"),
        _experts("MiniMax-M2.1", 62, 3072, 48, 8, (256, 8, 1536), 200064, weights="fp8"),
        _experts("MiniMax-M2.5", 62, 3072, 48, 8, (256, 8, 1536), 200064, weights="fp8"),
        _experts("MiniMax-M2.7", 62, 3072, 48, 8, (256, 8, 1536), 200064, weights="fp8"),
        _experts(
            "gpt-oss-20b",
            24,
            2880,
            64,
            8,
            (32, 4, 2880),
            201088,
            head_dim=64,
            window=(128, 12),
            weights="mxfp4",
            dense_weights="bf16",
        ),
        _experts(
            "gpt-oss-120b",
            36,
            2880,
            64,
            8,
            (128, 4, 2880),
            201088,
            head_dim=64,
            window=(128, 18),
            weights="mxfp4",
            dense_weights="bf16",
        ),
    )
} | {name: architecture_of(ModelConfig(f"model {name}", keys), name) for name, keys in CONFIGS.items()}
"""Models by repository name, without the owner and suffixes such as -Instruct."""

_DISTILLED = re.compile(r"^deepseek-r1-(distill-|0528-)?(?=llama|qwen)")
"""Distilled models, which have the architecture of the base model in their name."""
_UNTIMED = {
    "deepseek-v3.2": "sparse attention (an indexer that selects tokens)",
    "deepseek-v4": "compressed and sparse attention",
    "glm-5.2": "sparse attention with indexers that layers share",
    "kimi-linear": "Kimi delta attention",
    "kimi-k3": "Kimi delta attention",
    "mimo-v2": "windows with heads of their own",
    "gemma-4-e": "embeddings and MLPs by layer",
    **dict.fromkeys(("deepseek-v2", "minicpm3"), "latent attention (MLA) of sizes that are not known"),
}
"""Reasons why the times of a model are not known, by the start of its plain name."""

_SHORT = {
    "llama8b": "Llama-3.1-8B",
    "llama70b": "Llama-3.1-70B",
    "llama405b": "Llama-3.1-405B",
    **dict.fromkeys(("llama4scout", "llama4scout17b", "scout", "scout17b16e"), "Llama-4-Scout-17B-16E"),
    "llama4maverick": "Llama-4-Maverick-17B-128E",
    "mixtral7b": "Mixtral-8x7B",
    "mixtral": "Mixtral-8x7B",
    "mixtral22b": "Mixtral-8x22B",
    "llama7b": "Llama-2-7B",
    "vicuna7b": "Llama-2-7B",
    "vicuna13b": "Llama-2-13B",
    "llama13b": "Llama-2-13B",
    "qwen7b": "Qwen2.5-7B",
    "qwen3coder30ba3b": "Qwen3-30B-A3B",
    "qwen8b": "Qwen3-8B",
    "qwen72b": "Qwen2.5-72B",
    "qwen14b": "Qwen3-14B",
    "qwen32b": "Qwen3-32B",
    "mistral24b": "Mistral-Small-24B",
    **dict.fromkeys(("mistralsmall", "mistralsmall3.1-24b", "mistralsmall3.2-24b"), "Mistral-Small-24B"),
    "mistralnemo12b": "Mistral-Nemo",
    "gptoss": "gpt-oss-120b",
    "codellama": "CodeLlama-34B",
    **dict.fromkeys(("granite8b", "granite3.0-8b", "granite3.2-8b", "granite3.3-8b"), "Granite-3.1-8B"),
    "qwq32b": "Qwen2.5-32B",
    "deepseekv3.1terminus": "DeepSeek-V3.1",
    **dict.fromkeys(("kimik2.7code", "kimik2.7"), "Kimi-K2.6"),
    "mistrallarge3": "Mistral-Large-3-675B",
}
"""Names that tables of measurements use, by their `name_key`."""

_BY_KEY = {**{name_key(name): name for name in MODELS}, **_SHORT}


def known_name(model: str) -> str | None:
    """Return the name in `MODELS` that `model` is a spelling, a variant or a short form of; None: unknown."""
    whole = _BY_KEY.get(name_key(model.rpartition("/")[2]))
    if whole is not None:  # such as Kimi-K2-Thinking, whose weights differ from those of Kimi-K2
        return whole
    name = plain_name(model).removeprefix("nvidia-")
    if _DISTILLED.match(name):  # distilled Qwen models are Qwen2.5 unless their name says Qwen3
        name = re.sub(r"^qwen-", "qwen2.5-", _DISTILLED.sub("", name))
    return _BY_KEY.get(name_key(name))


def known_model(model: str) -> Architecture:
    """Return a known model, in the weight type that its name contains, if any.

    ConfigError lists the nearest names of an unknown model, or the reason why its times are not known.
    """
    name = known_name(model)
    if name is None:
        if (reason := _find_untimed(model)) is not None:
            raise ConfigError(
                f"model {model!r} has {reason}, which is not timed; give measured times instead"
            )
        raise unknown_model(model, MODELS)
    known, kind = MODELS[name], type_in_name(model)
    # In the name of an mxfp4 model, "fp4" can only mean mxfp4.
    if kind in (None, known.weights) or (kind, known.weights) == ("nvfp4", "mxfp4"):
        return known
    return msgspec.structs.replace(known, weights=kind)


def _find_untimed(model: str) -> str | None:
    """Return why the times of a model are not known; None if its name is not one of those."""
    plain = plain_name(model)
    return next((reason for start, reason in _UNTIMED.items() if plain.startswith(start)), None)


def unknown_model(model: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a model that is not among `known`: why it is refused, or the nearest names."""
    if (reason := _find_untimed(model)) is not None:
        return ConfigError(
            f"model {model!r} has {reason}, which is not timed, and its layers are not known by name; give measured "
            "times and the path of its config.json"
        )
    what = f"model {model!r} is neither a known name nor the path of a config.json"
    return ConfigError(unknown_name(what, known, plain_name(model)))
