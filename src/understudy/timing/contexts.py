"""Context windows of known models, from the `config.json` of their repositories."""

from __future__ import annotations

import math
import re
from pathlib import Path

from understudy.checks import read_settings
from understudy.errors import ConfigError
from understudy.kv.counts import count
from understudy.timing.known_configs import CONFIGS
from understudy.timing.known_models import known_name

CONTEXTS = {
    **dict.fromkeys(("Llama-2-7B", "Llama-2-13B", "Llama-2-70B", "Yi-34B"), 4096),
    **dict.fromkeys(("Phi-3-mini", "Phi-3-medium"), 4096),
    **dict.fromkeys(("Llama-3-8B", "Llama-3-70B", "Gemma-2-9B", "Gemma-2-27B"), 8192),
    **dict.fromkeys(("CodeLlama-7B", "CodeLlama-13B", "CodeLlama-34B", "CodeLlama-70B", "Phi-4"), 16384),
    **dict.fromkeys(("Qwen2.5-0.5B", "Qwen2.5-3B", "Mistral-7B", "Mistral-Small-24B", "Mixtral-8x7B"), 32768),
    **dict.fromkeys(("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"), 40960),
    **dict.fromkeys(("Qwen3-30B-A3B", "Qwen3-235B-A22B"), 40960),
    "Mixtral-8x22B": 65536,
    **dict.fromkeys(("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B"), 131072),
    **dict.fromkeys(("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.3-70B"), 131072),
    **dict.fromkeys(("Qwen2-7B", "Qwen2-72B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B"), 131072),
    **dict.fromkeys(
        ("Qwen2.5-32B", "Qwen2.5-72B", "Mistral-Nemo", "Mistral-Large", "Granite-3.1-8B"), 131072
    ),
    **dict.fromkeys(("Gemma-3-4B", "Gemma-3-12B", "Gemma-3-27B", "GLM-4.5", "GLM-4.5-Air"), 131072),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), 131072),
    **dict.fromkeys(("MiniMax-M2", "MiniMax-M2.1", "MiniMax-M2.5"), 196608),
    **dict.fromkeys(("GLM-4.6", "GLM-4.7"), 202752),
    "MiniMax-M2.7": 204800,
    **dict.fromkeys(("Qwen3-Coder-480B-A35B", "Qwen3-Next-80B-A3B"), 262144),
    "Llama-4-Maverick-17B-128E": 1048576,
    "Llama-4-Scout-17B-16E": 10485760,
    **{name: keys["max_position_embeddings"] for name, keys in CONFIGS.items()},
}
"""Tokens, by the names of `known_models.MODELS`."""

_VARIANTS = (
    (re.compile(r"codellama-70b-instruct"), 4096),
    (re.compile(r"granite-3\.0-"), 4096),
    (re.compile(r"vicuna-\d+b-v1\.5-16k"), 16384),
    (re.compile(r"qwen2\.5-(1\.5|7|14|32|72)b-instruct|qwen2-(7|72)b-instruct"), 32768),
    (re.compile(r"qwq-32b"), 40960),
    (re.compile(r"deepseek-r1-(distill|0528)-|phi-3-(mini|medium)-128k|mistral-small-3\.[12]-"), 131072),
    (re.compile(r"yi-34b-200k"), 200000),
    (re.compile(r"qwen3-.*-2507|qwen3-coder-"), 262144),
)
"""Variants of known models with another context, by the start of their names."""


def known_context(model: str) -> int | None:
    """Return the context of a known model, or of the `config.json` at a path, in tokens; None: unknown.

    ConfigError names the file and the invalid key.
    """
    path = Path(model) if model.endswith(".json") else Path(model, "config.json")
    if path.is_file():
        return _read(path)
    name = known_name(model)
    if name is None:
        return None
    written = model.rpartition("/")[2].lower()
    return next((context for start, context in _VARIANTS if start.match(written)), CONTEXTS[name])


def _read(path: Path) -> int | None:
    """Return the context as vLLM derives it: the trained one, times the factor of its scaling."""
    config = read_settings(path, "model ")
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    if config.get("max_position_embeddings") is None:
        return None
    context = count(
        f"model {path}: max_position_embeddings", config["max_position_embeddings"], 1, ConfigError
    )
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in (
        "yarn",
        "linear",
        "dynamic",
    ):
        return context
    trained, factor = scaling.get("original_max_position_embeddings", context), scaling.get("factor", 1.0)
    if not isinstance(trained, int) or not isinstance(factor, int | float) or not math.isfinite(factor):
        raise ConfigError(f"model {path}: rope_scaling: factor and original length must be numbers")
    return int(trained * factor)
