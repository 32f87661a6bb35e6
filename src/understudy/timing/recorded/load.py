"""`StepLoad`: a step's work as input of timing models; and measured times of a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from understudy import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StepLoad(_core.StepLoad):
    """Step load with the additional facts of the real engine; any timing model accepts it."""

    def __init__(
        self,
        *,
        chunks: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        context_tokens: int = 0,
        longest_context: int = 0,
        shared_tokens: int = 0,
        ahead: bool = False,
    ) -> None:
        super().__init__(
            chunks=chunks, decodes=decodes, context_tokens=context_tokens, longest_context=longest_context
        )
        self.shared_tokens = shared_tokens
        """Context tokens on pages that several decodes of the step share; they are read once."""
        self.ahead = ahead
        """Whether the step was prepared while the previous one ran."""


class LinkTimes(NamedTuple):
    """Milliseconds of the host per copy and per page, and of the link per page down and up."""

    copy_ms: float
    page_ms: float
    down_ms: float
    up_ms: float


def load_of(
    chunks: Iterable[tuple[int, int]], contexts: Iterable[int], shared_tokens: int = 0, *, ahead: bool = False
) -> StepLoad:
    """Build a step load from each chunk's tokens and history and each decode's context."""
    lengths = list(contexts)
    return StepLoad(
        chunks=list(chunks),
        decodes=len(lengths),
        context_tokens=sum(lengths),
        longest_context=max(lengths, default=0),
        shared_tokens=shared_tokens,
        ahead=ahead,
    )


def load_of_row(row: dict[str, Any]) -> StepLoad:
    """Build the step load of a recorded step."""
    chunks = ((tokens, history) for _, tokens, history in row["chunks"])
    contexts = (context for _, context in row["decodes"])
    return load_of(chunks, contexts, row["shared"], ahead=row["ahead"])
