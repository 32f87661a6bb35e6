"""What one worker of a role can do, as far as scalers ask."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class WorkerCapabilities:
    """GPUs and limits of one worker."""

    num_gpu: int = 1
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    context_length: int = 0
    """Longest sequence in tokens; 0: unknown."""
    max_kv_tokens: int = 2_000_000
    speculative_nextn: int = 0
    """Tokens that a draft proposes in a pass."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("context_length", "speculative_nextn") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{field.name}: {value!r} is not a whole number from {least} on")


def read_capabilities(given: Mapping[str, Any]) -> dict[str, WorkerCapabilities]:
    """Read `{"prefill": {...}, "decode": {...}}`. ConfigError names an unknown or missing role or key."""
    known = {field.name for field in fields(WorkerCapabilities)}
    silent = {"kv_cache_block_size", "total_kv_blocks"}  # no decision depends on them
    made = {}
    for role, values in given.items():
        if role not in ("prefill", "decode"):
            raise ConfigError(f"capabilities: {role!r} is not a role; choose prefill or decode")
        if values is None:
            continue
        unknown = set(values) - known - silent
        if unknown:
            raise ConfigError(f"capabilities of {role}: unknown {', '.join(sorted(unknown))}")
        made[role] = WorkerCapabilities(
            **{name: value for name, value in values.items() if value is not None and name in known}
        )
    if "decode" not in made:
        raise ConfigError("capabilities: the role decode is missing")
    return made
