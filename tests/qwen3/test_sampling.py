"""Tokens from logits, row by row, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch

from qwen3.building import engine_of, generate, prompt_of
from understudy.errors import InvalidArgument
from understudy.qwen3.request import Request
from understudy.qwen3.sampling import GREEDY, Draw, SamplingParams, draw_uniform, sample

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 0.0, 0.0, 0.0]])


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    assert sample(LOGITS, [Draw(), Draw(SamplingParams(top_k=1), 0.99)]).tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("params", "uniform", "token"),
    [
        (SamplingParams(), 0.0, 1),
        (SamplingParams(), 0.643, 1),  # e^3 / (e^0 + e^1 + e^2 + e^3) = 0.6439
        (SamplingParams(), 0.645, 3),
        (SamplingParams(), 0.9999, 0),
        (SamplingParams(top_k=2), 0.9999, 3),
        (SamplingParams(top_p=0.6), 0.9999, 1),
        (SamplingParams(top_p=0.65), 0.9999, 3),
        (SamplingParams(temperature=100.0), 0.26, 3),
    ],
)
def test_the_random_number_walks_down_the_tokens_in_order_of_probability(
    params: SamplingParams, uniform: float, token: int
) -> None:
    assert sample(LOGITS[:1], [Draw(params, uniform)]).tokens.tolist() == [token]


def test_random_numbers_are_even_and_depend_on_seed_and_number_alone() -> None:
    drawn = [draw_uniform(7, number) for number in range(4000)]
    assert drawn == [draw_uniform(7, number) for number in range(4000)]
    assert all(0 <= value < 1 for value in drawn)
    assert abs(sum(drawn) / 4000 - 0.5) < 0.02
    assert draw_uniform(8, 0) != draw_uniform(7, 0)


def test_a_seeded_request_answers_alike_alone_and_in_company() -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.9, seed=5)
    prompt = prompt_of(1, 12)
    alone = generate(engine_of(), prompt, sampling=sampling)[0]
    engine = engine_of(budget=16)
    for seed in range(3):
        engine.submit(Request(f"other {seed}", prompt_of(50 + seed, 9), 6, SamplingParams()))
    engine.submit(Request("it", prompt, 8, sampling))
    assert [o.token for o in engine.run() if o.request_id == "it"] == alone
    assert alone != generate(engine_of(), prompt)[0]  # greedy: it can differ


def test_log_probabilities_are_of_the_chosen_token_and_the_likeliest() -> None:
    engine = engine_of()
    engine.submit(Request("a", prompt_of(1, 9), 2, SamplingParams(temperature=0.0, logprobs=3)))
    engine.submit(Request("b", prompt_of(2, 9), 2, GREEDY))
    for output in engine.run():
        if output.request_id == "b":
            assert output.logprobs is None
            continue
        assert output.logprobs is not None
        assert output.logprobs.top[0] == (output.token, output.logprobs.chosen)
        assert [value for _, value in output.logprobs.top] == sorted(
            (value for _, value in output.logprobs.top), reverse=True
        )
        assert len(output.logprobs.top) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}, {"logprobs": 65}],
)
def test_values_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
