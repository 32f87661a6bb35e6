"""Context parallelism, which is not simulated: its names in every engine, and the error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTEXT_PARALLEL = (
    *("decode_context_parallel_size", "prefill_context_parallel_size", "context_parallel_size", "cp_size"),
    *("dcp_size", "attn_cp_size", "attention_context_parallel_size"),
)
"""Names of it in vLLM, SGLang and TensorRT-LLM."""


def describe_context_parallel(name: str) -> str:
    """Return the reason why a setting or flag is refused."""
    return f"{name}: context parallelism is not simulated, and no public times of it were found; leave it out"


def refuse_context_parallel(settings: Mapping[str, object], *, are_flags: bool = False) -> None:
    """Raise ConfigError if `settings` ask for it, by names of settings or of flags without dashes in front."""
    for name in CONTEXT_PARALLEL:
        given = name.replace("_", "-") if are_flags else name
        if settings.get(given) not in (None, 1):
            raise ConfigError(describe_context_parallel(f"--{given}" if are_flags else given))
