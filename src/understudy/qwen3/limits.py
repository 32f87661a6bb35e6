"""Limits of a step and of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.timing.recorded.shapes import MAX_CHUNKS

if TYPE_CHECKING:
    from understudy.kv import KvCacheManager


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_batched_tokens` is the budget of a step, decodes included; the window is the model's."""

    max_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_positions: int = 40960
    max_chunks: int = MAX_CHUNKS
    """Prompts per step: as many as a captured step has room for."""

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_positions, self.max_chunks) < 1:
            raise ConfigError("max_num_seqs, max_positions and max_chunks must be at least 1")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} must not be less than "
                f"max_num_seqs={self.max_num_seqs}, because every running request decodes in every step"
            )

    def refusal(self, manager: KvCacheManager, prompt: int, output: int) -> str | None:
        """Return why a request of such lengths can never run; None if it can."""
        if prompt < 1 or output < 1:
            return f"a request needs at least one prompt token and max_tokens of at least 1, got {prompt} and {output}"
        if prompt + output > self.max_positions:
            return (
                f"{prompt} prompt tokens and max_tokens={output} exceed the context window of "
                f"{self.max_positions} tokens"
            )
        if not manager.can_ever_fit(prompt, output):
            return (
                f"{prompt} prompt tokens and max_tokens={output} need "
                f"{manager.lifetime_blocks(prompt, output)} blocks; the KV cache has "
                f"{manager.max_request_blocks}"
            )
        return None
