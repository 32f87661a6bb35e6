"""The time of a whole step: against its formula term by term, and as an engine asks for it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engines.test_scripted_clock import content
from model.physical_timing import Step, step_ms
from replay.building import MS, single_turns
from understudy import _core
from understudy._core import StepLoad
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.timing.coefficients import CAPTURES, StepCoefficients
from understudy.timing.physical import Domain, Physical

FULL = StepCoefficients(
    weights_ms=4.0,
    token_ms=0.02,
    expert_ms=0.05,
    local_experts=16,
    expert_share=0.125,
    expert_token_ms=0.003,
    head_ms=0.4,
    head_sequence_ms=0.001,
    context_ms=2e-5,
    window_context_ms=1e-5,
    window=128,
    mix=1.7,
    attention_ms=3e-7,
    window_attention_ms=2e-7,
    comm_ms=0.7,
    comm_token_ms=0.002,
    comm_rank_token_ms=0.001,
    step_ms=1.1,
    sequence_ms=0.011,
    prefill_ms=1.3,
    floor_ms=30.0,
)


def expected_ms(numbers: StepCoefficients, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    return step_ms(numbers, Step(contexts=contexts, chunks=chunks))


def load(chunks: list[tuple[int, int]], contexts: list[int], window: int = 10**9, **more: int) -> StepLoad:
    return StepLoad(
        chunks=chunks,
        decodes=len(contexts),
        context_tokens=sum(contexts),
        windowed_context=sum(min(length, window) for length in contexts),
        longest_context=max(contexts, default=0),
        **more,
    )


chunks_of = st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 5000)), max_size=4)
contexts_of = st.lists(st.integers(1, 9000), max_size=40)


@given(chunks_of, contexts_of, st.sampled_from([0, 1, 128, 4096]), st.sampled_from([2.0, 2.5, 1.0]))
def test_a_step_is_the_sum_of_its_terms(
    chunks: list[tuple[int, int]], contexts: list[int], window: int, softness: float
) -> None:
    numbers = msgspec.structs.replace(FULL, window=window, softness=softness)
    if window == 0:
        numbers = msgspec.structs.replace(numbers, window_context_ms=0.0, window_attention_ms=0.0)
    assume(chunks or contexts)
    ms = numbers.build().step_ms(load(chunks, contexts, window))
    # A prompt token sees half of itself: summed, that is exact but for the one token that crosses the window.
    assert ms == pytest.approx(expected_ms(numbers, chunks, contexts), rel=1e-6)


@given(chunks_of, contexts_of, st.data())
def test_a_step_that_does_more_takes_no_less(
    chunks: list[tuple[int, int]], contexts: list[int], data: st.DataObject
) -> None:
    timing = FULL.build()
    before = timing.step_ms(load(chunks, contexts, 128))
    ways = ["new chunk", "new decode", "ranks"]
    ways += ["longer chunk", "longer history"] if chunks else []
    ways += ["longer context"] if contexts else []
    way = data.draw(st.sampled_from(ways))
    more_chunks, more_contexts, ranks = list(chunks), list(contexts), 0
    by = data.draw(st.integers(1, 700))
    if way == "new chunk":
        more_chunks.append((by, data.draw(st.integers(0, 900))))
    elif way == "new decode":
        more_contexts.append(by)
    elif way == "longer context":
        more_contexts[-1] += by
    elif way == "ranks":
        ranks = load(chunks, contexts).tokens + by
    else:
        tokens, history = more_chunks[-1]
        more_chunks[-1] = (tokens + by, history) if way == "longer chunk" else (tokens, history + by)
    assert timing.step_ms(load(more_chunks, more_contexts, 128, rank_tokens=ranks)) >= before


@given(chunks_of, contexts_of, st.sampled_from([f for f in FULL.__struct_fields__ if f.endswith("_ms")]))
def test_no_number_that_grows_makes_a_step_shorter(
    chunks: list[tuple[int, int]], contexts: list[int], field: str
) -> None:
    slower = msgspec.structs.replace(FULL, **{field: getattr(FULL, field) * 1.5})
    step = load(chunks, contexts, 128)
    assert slower.build().step_ms(step) >= FULL.build().step_ms(step)


def test_steps_are_padded_to_the_graphs_that_vllm_captures() -> None:
    timing = StepCoefficients(token_ms=1.0).build()
    for tokens, padded in [(1, 1), (3, 4), (9, 16), (256, 256), (257, 272), (512, 512), (513, 513)]:
        assert timing.step_ms(load([(tokens, 0)], [])) == padded
    assert CAPTURES[-1] == 512


def test_the_launch_floor_holds_where_there_is_prefill_and_no_graph() -> None:
    timing = StepCoefficients(step_ms=1.0, floor_ms=9.0).build()
    assert timing.step_ms(load([(512, 0)], [])) == 1.0
    assert timing.step_ms(load([(513, 0)], [])) == 9.0
    assert timing.step_ms(load([], [7] * 600)) == 1.0
    nowhere = StepCoefficients(step_ms=1.0, floor_ms=9.0, floor_above_tokens=0).build()
    assert nowhere.step_ms(load([(2, 0)], [])) == 9.0


def test_experts_that_a_token_misses_are_not_read() -> None:
    timing = StepCoefficients(expert_ms=1.0, local_experts=32, expert_share=4 / 128).build()
    assert timing.step_ms(load([], [5])) == pytest.approx(1.0)
    assert timing.step_ms(load([], [5, 5])) == pytest.approx(2.0, rel=0.02)
    assert timing.step_ms(load([(4000, 0)], [])) == pytest.approx(32.0)
    assert timing.step_ms(load([], [5], rank_tokens=4000)) == pytest.approx(32.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_ms": math.nan}, "token_ms"),
        ({"weights_ms": -1.0}, "weights_ms"),
        ({"expert_share": 1.5}, "expert_share"),
        ({"mix": 0.5}, "mix"),
        ({"softness": 0.5}, "softness"),
        ({"window_context_ms": 1.0}, "need window"),
        ({"captures": (4, 4)}, "captures must rise"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StepCoefficients(**wrong).build()


def test_a_speedup_of_decoding_needs_a_model_that_times_it_apart() -> None:
    engine = VllmConfig(timing=Physical(coefficients=FULL), mocker=MockerSettings(decode_speedup_ratio=2.0))
    with pytest.raises(ConfigError, match="decode_speedup_ratio=2 needs a timing model"):
        run_offline(RunPlan(single_turns([10]), engine))


# ── As an engine asks for it ──


class Listening:
    """Constant steps; remembers what they had to do."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[tuple[int, int]], int, int, int]] = []

    def step_ms(self, step: StepLoad) -> float:
        self.seen.append((step.chunks, step.decodes, step.context_tokens, step.longest_context))
        assert step.requests == len(step.chunks) + step.decodes
        assert step.tokens == sum(tokens for tokens, _ in step.chunks) + step.decodes
        return 10.0


def test_a_model_in_python_sees_every_step_as_a_whole() -> None:
    model = Listening()
    engine = VllmConfig(async_scheduling=False, block_size=16, max_num_batched_tokens=100)
    run = run_offline(RunPlan(single_turns([60, 130], [3, 2]), engine, timing=model))
    assert model.seen == [
        ([(60, 0), (40, 0)], 0, 0, 0),
        ([(90, 40)], 1, 61, 61),
        ([], 2, 62 + 131, 131),
    ]
    assert run.timeline.last_token_ns.tolist() == [30 * MS, 30 * MS]


def test_a_replay_takes_the_time_of_its_steps() -> None:
    timing = Physical(coefficients=msgspec.structs.replace(FULL, window=70))
    numbers = timing.coefficients
    engine = VllmConfig(async_scheduling=False, block_size=16, max_num_batched_tokens=100, timing=timing)
    columns = run_offline(RunPlan(single_turns([60, 130], [30, 20]), engine)).timeline
    first = expected_ms(numbers, [(60, 0), (40, 0)], [])
    second = expected_ms(numbers, [(90, 40)], [61])
    rest = [expected_ms(numbers, [], [62 + i, 131 + i]) for i in range(19)]
    rest += [expected_ms(numbers, [], [81 + i]) for i in range(9)]
    ends = [first + second + sum(rest[:19]), first + second + sum(rest)]
    assert columns.first_token_ns == pytest.approx([first * MS, (first + second) * MS], rel=1e-6)
    assert sorted(columns.last_token_ns) == pytest.approx([end * MS for end in ends], rel=1e-6)


def test_time_outside_of_the_domain_is_counted() -> None:
    config = VllmConfig(async_scheduling=False, block_size=16, num_gpu_blocks=100)
    timing = Physical(coefficients=StepCoefficients(step_ms=2.0), domain=Domain(requests=1, prompt_tokens=40))
    shares = []
    for prompts in ([30], [50], [30, 30]):
        engine = _core.VllmEngine(config.native(), timing.build())
        for number, prompt in enumerate(prompts):
            engine.submit(str(number), prompt, 10 + 10 * number, content(1 + 200 * number, 150, 16))
        engine.advance(10**12)
        shares.append((engine.steps, engine.step_ns // MS, engine.uncovered_ns // MS))
    assert shares == [(10, 20, 0), (10, 20, 2), (20, 40, 20)]
