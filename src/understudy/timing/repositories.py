"""Repositories of known models on Hugging Face, for commands that start real engines."""

from __future__ import annotations

from understudy.timing.architecture import plain_name
from understudy.timing.known_models import known_name
from understudy.timing.names import name_key

_OWNED = {
    "meta-llama": (
        *("Llama-2-7b-chat-hf", "Llama-2-13b-chat-hf", "Llama-2-70b-chat-hf"),
        *("Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B-Instruct"),
        *("Llama-3.1-8B-Instruct", "Llama-3.1-70B-Instruct", "Llama-3.1-405B-Instruct"),
        *("Llama-3.2-1B-Instruct", "Llama-3.2-3B-Instruct", "Llama-3.3-70B-Instruct"),
        *("Llama-4-Scout-17B-16E-Instruct", "Llama-4-Maverick-17B-128E-Instruct"),
    ),
    "codellama": ("CodeLlama-7b-hf", "CodeLlama-13b-hf", "CodeLlama-34b-hf", "CodeLlama-70b-hf"),
    "Qwen": (
        *("Qwen2-7B", "Qwen2-72B"),
        *(f"Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")),
        *(f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")),
        *("Qwen3-Coder-480B-A35B-Instruct", "Qwen3-Next-80B-A3B-Instruct"),
        *("Qwen3.5-397B-A17B", "Qwen3.5-122B-A10B", "Qwen3.5-35B-A3B", "Qwen3.5-27B"),
    ),
    "mistralai": (
        *("Mistral-7B-Instruct-v0.3", "Mistral-Nemo-Instruct-2407", "Mistral-Small-24B-Instruct-2501"),
        *(
            "Mistral-Large-3-675B-Instruct-2512",
            "Mistral-Large-Instruct-2407",
            "Mixtral-8x7B-Instruct-v0.1",
            "Mixtral-8x22B-Instruct-v0.1",
        ),
    ),
    "01-ai": ("Yi-34B-Chat",),
    "microsoft": ("Phi-3-mini-4k-instruct", "Phi-3-medium-4k-instruct", "phi-4"),
    "ibm-granite": ("granite-3.1-8b-instruct",),
    "google": (
        *("gemma-2-9b-it", "gemma-2-27b-it", "gemma-3-4b-it", "gemma-3-12b-it", "gemma-3-27b-it"),
        *("gemma-4-31B-it", "gemma-4-26B-A4B-it"),
    ),
    "zai-org": ("GLM-4.5", "GLM-4.6", "GLM-4.5-Air", "GLM-4.7", "GLM-4.7-Flash", "GLM-5", "GLM-5.1"),
    "MiniMaxAI": ("MiniMax-M2", "MiniMax-M2.1", "MiniMax-M2.5", "MiniMax-M2.7", "MiniMax-M3"),
    "openai": ("gpt-oss-20b", "gpt-oss-120b"),
    "deepseek-ai": ("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1"),
    "moonshotai": ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.6"),
    "nvidia": ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
}
"""Repositories by owner. A variant has the context of the plain name, so Qwen2 and Qwen2.5 are base models."""


REPOSITORIES = {
    name_key(known_name(name) or plain_name(name)): f"{owner}/{name}"
    for owner, names in _OWNED.items()
    for name in names
}
"""Repository ids, by the `name_key` of the model's plain name."""


def find_repository(model: str) -> str | None:
    """Return the repository of a known model, given its plain name (Llama-3.1-8B); None for others and variants."""
    return REPOSITORIES.get(name_key(model))
