"""The numeric gate in bfloat16: 48 fixed sequences, 816 positions, against `transformers` and against each other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qwen3.building import CPU, TINY, Poisoned, prompt_of
from understudy.kv import KvCacheManager
from understudy.qwen3.arrays import StepArrays
from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.forward import batch_decode, batch_prefill, forward, unified_step
from understudy.qwen3.reference import ReferenceBackend
from understudy.qwen3.weights import random_weights
from understudy.timing.recorded.shapes import Shape

pytest.importorskip("transformers", reason="transformers is not installed")
from qwen3.test_against_transformers import build_twin, logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from understudy.kv import RequestKv

CONFIG = replace(
    TINY, dtype="bfloat16", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, kv_heads=1
)
WEIGHTS = random_weights(CONFIG, 7, CPU)
FORCED = 16
PROMPTS = [prompt_of(seed, 1 + seed * 255 // 47) for seed in range(48)]  # of 1 to 256 tokens
ANSWERS = [prompt_of(100 + seed, FORCED) for seed in range(48)]
PAGE, BLOCKS = 16, 1000
SOME = range(0, 48, 4)


@pytest.fixture(autouse=True)
def _without_a_detour() -> Iterator[None]:
    """A CPU without bfloat16 would try it anew for every product, and fail."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before


class Stand:
    """A pool, its pages and the network."""

    def __init__(self) -> None:
        self.manager = KvCacheManager(BLOCKS, CONFIG.layout(PAGE))
        self.buffer = Poisoned(BLOCKS, self.manager.layout, torch.bfloat16, CPU)
        self.buffer.pages[self.manager.padding_block] = 0
        self.backend = ReferenceBackend(CONFIG, CPU)

    def prefill(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        return batch_prefill(WEIGHTS, chunks, self.buffer, self.backend)

    def decode(self, decodes: Sequence[Decode]) -> torch.Tensor:
        return batch_decode(WEIGHTS, decodes, self.buffer, self.backend)

    def decode_padded(self, decodes: Sequence[Decode]) -> torch.Tensor:
        """As a captured step computes them: in a shape with room for more."""
        shape = Shape(0, 64)
        arrays = StepArrays([shape], padding_block=self.manager.padding_block, max_pages=32, device=CPU)
        arrays.fill(shape, (), decodes)
        return forward(WEIGHTS, arrays.batch(shape), self.buffer, self.backend)[: len(decodes)]

    @torch.inference_mode()
    def forced(
        self, numbers: Sequence[int], decode: Callable[[Sequence[Decode]], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits [sequence, 17, vocab] of sequences that run side by side, and the cached tokens of each."""
        decode = self.decode if decode is None else decode
        with ExitStack() as held:
            kvs = [held.enter_context(self.manager.request(PROMPTS[n], FORCED + 1)) for n in numbers]
            cached = [kv.match_prefix() for kv in kvs]
            rows = [self.prefill([_rest(kv) for kv in kvs])]
            for kv, number in zip(kvs, numbers, strict=True):
                kv.apply_prefill(ANSWERS[number][0])
            for step in range(FORCED):
                for kv in kvs:
                    kv.schedule_decode()
                fed = zip(kvs, numbers, strict=True)
                rows.append(decode([Decode(ANSWERS[n][step], kv.view()) for kv, n in fed]))
                for kv, number in zip(kvs, numbers, strict=True):
                    kv.apply_decode(ANSWERS[number][min(step + 1, FORCED - 1)])
        return torch.stack(rows, 1), cached


def _rest(kv: RequestKv) -> Chunk:
    start, end = kv.computed_tokens, kv.prompt_tokens
    kv.schedule_prefill(end - start)
    return Chunk(kv.tokens[start:end], kv.view())


@cache
def theirs() -> torch.Tensor:
    """Log probabilities of `transformers`, [sequence, 17, vocab]."""
    model: Any = build_twin(CONFIG, WEIGHTS)
    rows = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        rows.append(logits_of(model, [*prompt, *answer])[len(prompt) - 1 :].float().log_softmax(-1))
    return torch.stack(rows)


def sequential() -> torch.Tensor:
    """Each in its turn."""
    stand = Stand()
    rows = torch.cat([stand.forced([number])[0] for number in SOME])
    stand.manager.close()
    return rows


def gate(logits: torch.Tensor, truth: torch.Tensor) -> None:
    """The tokens that we choose lose at most 0.2 nats, and the likeliest eight are off by 0.06 on average."""
    ours = logits.float().log_softmax(-1)
    assert ours.shape == truth.shape
    assert not ours.isnan().any()
    regret = truth.max(-1).values - truth.gather(-1, ours.argmax(-1, keepdim=True))[..., 0]
    assert regret.max() <= 0.20
    top = truth.topk(8, dim=-1)
    off = (top.values - ours.gather(-1, top.indices)).abs().flatten()
    print(f"{ours.shape[0] * ours.shape[1]} positions: regret {regret.max():.3f}, worst {off.max():.3f}")
    assert off.mean() <= 0.06
    assert off.quantile(0.99) <= 0.20


def test_one_after_the_other_they_are_those_of_transformers_and_twice_equal_to_the_bit() -> None:
    logits = sequential()
    gate(logits, theirs()[SOME])
    assert sequential().equal(logits)
    with pytest.raises(AssertionError):  # the gate is not open
        gate(logits.roll(1, -1), theirs()[SOME])


def test_side_by_side_they_are_those_of_transformers() -> None:
    stand = Stand()
    logits, cached = stand.forced(range(48))
    stand.manager.close()
    assert logits.shape[:2] == (48, 17)  # 816 positions
    assert sum(cached) == 0
    gate(logits, theirs())


def test_padded_as_a_captured_step_they_are_those_of_transformers() -> None:
    stand = Stand()
    logits, _ = stand.forced(SOME, stand.decode_padded)
    stand.manager.close()
    gate(logits, theirs()[SOME])


def test_behind_a_warm_cache_they_are_those_of_a_cold_one_and_of_transformers() -> None:
    stand = Stand()
    cold, _ = stand.forced(SOME)
    both = [*SOME, *range(2, 48, 8)]  # and some cold ones beside them
    warm, cached = stand.forced(both)
    stand.manager.close()
    assert cached[: len(SOME)] == [(len(PROMPTS[number]) - 1) // PAGE * PAGE for number in SOME]
    assert sum(cached[len(SOME) :]) == 0
    gate(warm, theirs()[both])
    gate(warm[: len(SOME)], cold.float().log_softmax(-1))


@torch.inference_mode()
def test_a_warm_prompt_beside_decodes_is_that_of_a_cold_one() -> None:
    stand = Stand()
    number, other = 30, 40
    stand.forced([number])
    with stand.manager.request(PROMPTS[other], 4) as a, stand.manager.request(PROMPTS[number], 4) as b:
        stand.prefill([_rest(a)])
        a.apply_prefill(ANSWERS[other][0])
        a.schedule_decode()
        assert b.match_prefix() == (len(PROMPTS[number]) - 1) // PAGE * PAGE
        both = unified_step(
            WEIGHTS, [_rest(b)], [Decode(ANSWERS[other][0], a.view())], stand.buffer, stand.backend
        )
    stand.manager.close()
    truth = torch.stack([theirs()[number, 0], theirs()[other, 1]])
    gate(both[:, None], truth[:, None])
