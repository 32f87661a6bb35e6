"""Answer format of `/generative_scoring`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from understudy._core import xxh3_64
from understudy.server.api.logprobs import logprob_of

if TYPE_CHECKING:
    from understudy.server.api.choice import Choice
    from understudy.server.api.errors import ApiError
    from understudy.server.api.generation import Generation


class ScoringStyle:
    """Scores the first label for every item: a synthetic probability, computed from prompt and label."""

    def __init__(self, labels: list[int], *, softmax: bool) -> None:
        self._labels = labels
        self._softmax = softmax

    def begin(self, generation: Generation) -> None:
        """Do nothing: scores are not streamed."""

    def chunk(self, generation: Generation, choice: Choice, first: int, count: int, last: bool) -> bytes:  # noqa: ARG002
        """Return no events: scores are not streamed."""
        return b""

    def close(self, generation: Generation) -> bytes:  # noqa: ARG002
        """Return no events: scores are not streamed."""
        return b""

    def reject(self, generation: Generation, error: ApiError) -> bytes:  # noqa: ARG002
        """Return no events: scores are not streamed."""
        return b""

    def whole(self, generation: Generation) -> bytes:
        """Format one score per item."""
        return msgspec.json.encode(
            {
                "id": generation.id,
                "object": "list",
                "created": generation.created,
                "model": generation.model,
                "data": [
                    {"index": choice.index, "object": "score", "score": self._score(choice)}
                    for choice in generation.choices
                ],
                "usage": generation.plain_usage(),
            }
        )

    def _score(self, choice: Choice) -> float:
        key = xxh3_64(choice.prompt.tobytes(), 0)
        odds = [math.exp(logprob_of((key >> 7) ^ label)) for label in self._labels]
        return odds[0] / sum(odds) if self._softmax else odds[0] / (1.0 + sum(odds))
