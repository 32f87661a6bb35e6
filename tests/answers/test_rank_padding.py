"""Ranks that share experts: which steps are padded, by a second implementation of vLLM's rule (dp_utils.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import MS, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.physical import Physical

if TYPE_CHECKING:
    from understudy._core import StepLoad

TOKEN_MS, EXPERT_MS = 0.5, 1.0
"""Time of a rank's token in its linear layers, and of a token of all ranks in the experts."""


def step_ms(tokens: list[int], captures: list[int]) -> float:
    """Time of one step of all ranks, of which those without work compute a token for nothing."""
    busy = [max(count, 1) for count in tokens]
    graphs = [next((size for size in captures if size >= count), 0) for count in busy]
    synced = min(1 if graph else 0 for graph in graphs)  # 0: one of them runs without a graph, and so do all
    after = [max(busy)] * len(busy) if synced else busy
    width = next((size for size in captures if size >= max(after)), max(after))
    return TOKEN_MS * width + EXPERT_MS * sum(after)


def finish_times(prompts: list[int], outputs: list[int], captures: list[int]) -> list[float]:
    """Time of the last token of one request on each rank, all of which arrive at 0."""
    now = 0.0
    left = list(outputs)
    ends = [0.0] * len(prompts)
    while any(left):
        first = left == list(outputs)
        now += step_ms(
            [(prompt if first else 1) if count else 0 for prompt, count in zip(prompts, left, strict=True)],
            captures,
        )
        for rank, count in enumerate(left):
            if count:
                left[rank] -= 1
                ends[rank] = now
    return ends


@st.composite
def ranks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    count = draw(st.integers(2, 8))
    prompts = draw(st.lists(st.integers(1, 200), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    captures = sorted(draw(st.sets(st.integers(1, 256), max_size=6)))
    return prompts, outputs, captures


def audit(case: tuple[list[int], list[int], list[int]]) -> None:
    prompts, outputs, captures = case
    coefficients = StepCoefficients(
        token_ms=TOKEN_MS,
        expert_token_ms=EXPERT_MS,
        local_experts=1,
        captures=tuple(captures),
        ranks=len(prompts),
    )
    engine = VllmConfig(
        block_size=16, async_scheduling=False, timing=Physical(coefficients=coefficients), num_gpu_blocks=500
    )
    run = run_offline(RunPlan(single_turns(prompts, outputs), engine, workers=len(prompts), ranks=True))
    assert run.timeline.worker.tolist() == list(range(len(prompts)))
    expected = [round(end * MS) for end in finish_times(prompts, outputs, captures)]
    assert run.timeline.last_token_ns.tolist() == expected


@settings(max_examples=30)
@given(ranks())
def test_every_step_takes_as_long_as_the_rule_says(case: tuple[list[int], list[int], list[int]]) -> None:
    audit(case)


@pytest.mark.soak
@settings(max_examples=5000)
@given(ranks())
def test_every_step_of_many_cases(case: tuple[list[int], list[int], list[int]]) -> None:
    audit(case)


class Seen:
    """A model of a user that keeps what it is told of the ranks of the first step."""

    def __init__(self) -> None:
        self.told: set[tuple[int, int, int]] = set()

    def step_ms(self, step: StepLoad) -> float:
        if step.rank_tokens:
            self.told.add((step.tokens, step.rank_tokens, step.rank_width))
        return 1.0


def test_a_long_prompt_on_one_of_eight_ranks_is_computed_once() -> None:
    seen = Seen()
    engine = VllmConfig(
        block_size=16, async_scheduling=False, num_gpu_blocks=500, max_num_batched_tokens=8192
    )
    run_offline(RunPlan(single_turns([2800] + [3] * 7), engine, workers=8, ranks=True, timing=seen))
    assert seen.told == {(2800, 2821, 0), (3, 2821, 0)}


def test_short_prompts_are_padded_to_the_longest_of_them() -> None:
    seen = Seen()
    engine = VllmConfig(
        block_size=16, async_scheduling=False, num_gpu_blocks=500, max_num_batched_tokens=8192
    )
    run_offline(RunPlan(single_turns([512] + [3] * 7), engine, workers=8, ranks=True, timing=seen))
    assert seen.told == {(512, 4096, 512), (3, 4096, 512)}
