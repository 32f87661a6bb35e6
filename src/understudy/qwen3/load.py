"""A step as a timing model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.kv import KvView
    from understudy.qwen3.executor import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """(tokens, history) of each chunk of a prompt; how many decodes, and the contexts that they read."""

    chunks: Sequence[tuple[int, int]] = ()
    decodes: int = 0
    context_tokens: int = 0
    longest_context: int = 0
    shared_tokens: int = 0
    """Of the contexts, those on pages that another decode of the step reads too: they are read once."""
    ahead: bool = False
    """It was prepared while the one before it ran."""

    @property
    def tokens(self) -> int:
        """That it computes."""
        return sum(tokens for tokens, _ in self.chunks) + self.decodes


def load_of(
    chunks: Iterable[tuple[int, int]], contexts: Iterable[int], shared_tokens: int = 0, *, ahead: bool = False
) -> StepLoad:
    """From each chunk's tokens and history, and each decode's context."""
    lengths = list(contexts)
    return StepLoad(
        chunks=list(chunks),
        decodes=len(lengths),
        context_tokens=sum(lengths),
        longest_context=max(lengths, default=0),
        shared_tokens=shared_tokens,
        ahead=ahead,
    )


def load_of_step(step: Step) -> StepLoad:
    """Of what an executor is given."""
    return load_of(
        ((len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)) for chunk in step.chunks),
        (decode.view.seq_len for decode in step.decodes),
        shared_tokens([decode.view for decode in step.decodes]),
        ahead=step.ahead,
    )


def shared_tokens(views: Sequence[KvView]) -> int:
    """Tokens on pages beyond their first mention."""
    if len(views) < 2:
        return 0
    pages = np.concatenate([view.page_ids for view in views])
    return int(len(pages) - len(np.unique(pages))) * views[0].page_size
