"""Sample tokens from logits for the whole batch on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from understudy._core import xxh3_64
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep all tokens.

    With a `seed`, the choice depends only on it, the logits and the token's index, not on other requests.
    `logprobs` is the number of alternatives to return in addition to the chosen token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidArgument(f"temperature must not be negative, got {self.temperature}")
        if self.top_k < 0:
            raise InvalidArgument(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p must be in (0, 1], got {self.top_p}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 64:
            raise InvalidArgument(f"logprobs must be from 0 to 64, got {self.logprobs}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0 or self.top_k == 1


GREEDY = SamplingParams(temperature=0.0)


class Draw(NamedTuple):
    """Sampling parameters and random number of a row; drawn by the scheduler, so that all ranks use the same."""

    params: SamplingParams = GREEDY
    uniform: float = 0.0


def draw_uniform(seed: int, number: int) -> float:
    """Return the random number in [0, 1) of a request's output token `number`."""
    return (xxh3_64(number.to_bytes(8, "little"), seed % 2**64) >> 11) * 2.0**-53


class Logprobs(NamedTuple):
    """Log probability of a chosen token, and the most likely tokens with theirs."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Sampled(NamedTuple):
    """Tokens on the device, and log probabilities of all rows if any row requested them."""

    tokens: torch.Tensor
    chosen: torch.Tensor | None = None
    top_values: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw], greedy: torch.Tensor | None = None) -> Sampled:
    """Sample a token for every row. `greedy`: the most likely tokens, if already computed."""
    greedy = logits.argmax(-1) if greedy is None else greedy
    tokens = greedy
    if not all(draw.params.greedy for draw in draws):
        tokens = torch.where(_column(logits, [d.params.greedy for d in draws]), greedy, _draw(logits, draws))
    wanted = max((draw.params.logprobs for draw in draws if draw.params.logprobs is not None), default=None)
    if wanted is None:
        return Sampled(tokens)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    top_values, top_tokens = logprobs.topk(wanted, dim=-1)
    return Sampled(tokens, chosen, top_values, top_tokens)


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Sample by the inverse cumulative distribution over tokens in descending order of probability."""
    temperature = _column(logits, [max(draw.params.temperature, 1e-6) for draw in draws])
    values, order = (logits.float() / temperature[:, None]).sort(dim=-1, descending=True)
    probabilities = values.softmax(-1)
    top_k = _column(logits, [draw.params.top_k or logits.shape[-1] for draw in draws])
    probabilities[torch.arange(logits.shape[-1], device=logits.device) >= top_k[:, None]] = 0
    cumulative = probabilities.cumsum(-1)
    # A token stays while those before it have not reached top_p; the most likely one always stays.
    top_p = _column(logits, [draw.params.top_p for draw in draws]) * cumulative[:, -1]
    probabilities[(cumulative - probabilities) >= top_p[:, None]] = 0
    cumulative = probabilities.cumsum(-1)
    uniform = _column(logits, [draw.uniform for draw in draws])
    threshold = uniform[:, None] * cumulative[:, -1:]
    place = (cumulative <= threshold).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not exceed the last token that stays
    return order.gather(-1, place.minimum(last))[:, 0]


def _column(logits: torch.Tensor, values: Sequence[float] | Sequence[bool]) -> torch.Tensor:
    return torch.tensor(values).to(logits.device, non_blocking=True)
