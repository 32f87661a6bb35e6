"""However a request is computed, its greedy tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3.building import (
    CPU,
    PAGE,
    TINY,
    alone,
    engine_of,
    executor_of,
    generate,
    manager_of,
    prompt_of,
    whole,
)
from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.executor import Step, convert_to_decodes
from understudy.qwen3.forward import batch_decode, batch_prefill
from understudy.qwen3.request import Request
from understudy.qwen3.sampling import Draw
from understudy.qwen3.weights import random_weights


def test_batched_requests_answer_as_they_do_alone() -> None:
    prompts = [prompt_of(seed, 3 + 7 * seed) for seed in range(6)]
    engine = engine_of()
    assert generate(engine, *prompts, max_tokens=12) == [alone(prompt, 12) for prompt in prompts]
    whole(engine)


@pytest.mark.parametrize("budget", range(1, 24))
def test_a_prompt_in_chunks_of_any_size_answers_as_whole(budget: int) -> None:
    prompt = prompt_of(5, 23)
    assert alone(prompt, budget=budget, seqs=1) == alone(prompt)


@pytest.mark.parametrize("length", range(1, 3 * PAGE + 2))
def test_decoding_across_page_boundaries_reads_no_row_that_nobody_wrote(length: int) -> None:
    """Fresh pages are NaN: a surplus page in a view would poison the answer (B1)."""
    prompt = prompt_of(11, length)
    assert alone(prompt, 3 * PAGE) == alone(prompt, 3 * PAGE, page=64)


def test_prompts_join_while_others_decode() -> None:
    early, late = prompt_of(1, 18), prompt_of(2, 31)
    engine = engine_of(budget=16)
    engine.submit(Request("early", early, 20))
    outputs = []
    for _ in range(6):
        outputs += engine.step()
    engine.submit(Request("late", late, 9))
    outputs += engine.run()
    answers = {name: [o.token for o in outputs if o.request_id == name] for name in ("early", "late")}
    assert answers == {"early": alone(early, 20), "late": alone(late, 9)}


def test_a_warm_prefix_answers_as_a_cold_one() -> None:
    prompt = prompt_of(4, 50)
    longer = [*prompt, *prompt_of(9, 16)]
    engine = engine_of(page=16, blocks=32)
    cold = generate(engine, prompt)
    assert generate(engine, prompt) == cold
    assert generate(engine, longer) == [alone(longer, page=16, blocks=32)]
    whole(engine)


@pytest.mark.parametrize(("length", "cached"), [(50, 48), (64, 48), (16, 0), (17, 16)])
def test_of_a_repeated_prompt_whole_pages_are_cached_and_one_token_is_left(length: int, cached: int) -> None:
    prompt = prompt_of(4, length)
    engine = engine_of(page=16, blocks=32)
    for expected in (0, cached):
        engine.submit(Request("again", prompt, 2))
        assert {output.cached_tokens for output in engine.run()} == {expected}


def test_an_extension_of_a_prompt_finds_the_pages_of_it_and_of_its_answer() -> None:
    prompt = prompt_of(4, 50)
    engine = engine_of(page=16, blocks=32)
    answer = generate(engine, prompt, max_tokens=16)[0]
    engine.submit(Request("longer", [*prompt, *answer], 2))  # 66 tokens, 65 of them computed
    assert engine.run()[0].cached_tokens == 64


def test_a_warm_prompt_beside_a_decode_answers_as_it_does_alone() -> None:
    warm, running = prompt_of(4, 50), prompt_of(5, 20)
    engine = engine_of(page=16, blocks=32)
    generate(engine, warm, max_tokens=2)
    engine.submit(Request("running", running, 20))
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.submit(Request("warm", warm, 6))
    outputs += engine.run()
    heard = {name: [o.token for o in outputs if o.request_id == name] for name in ("running", "warm")}
    assert heard == {"running": alone(running, 20), "warm": alone(warm, 6)}
    assert {o.cached_tokens for o in outputs if o.request_id == "warm"} == {48}


@pytest.mark.parametrize("generated", [1, 3, 6])
@pytest.mark.parametrize("evicted", [False, True])
def test_a_request_that_was_preempted_goes_on_with_the_same_tokens(generated: int, evicted: bool) -> None:
    """The scheduler preempts nobody; who embeds the manager may. Its tokens are computed again, or found."""
    manager = manager_of(TINY, 32)
    executor = executor_of(TINY, manager)
    prompt = prompt_of(8, 13)
    said: list[int] = []

    def run(step: Step) -> int:
        executor.begin(step)
        return executor.finish().tokens[0]

    with manager.request(prompt, 8) as kv:

        def prefill() -> int:
            start, end = kv.computed_tokens, kv.prefill_target
            kv.schedule_prefill(end - start)
            token = run(Step([Chunk(kv.tokens[start:end], kv.view())], [], [Draw()]))
            kv.apply_prefill(token)
            return token

        said.append(prefill())
        while not kv.finished:
            if len(said) == generated and kv.generated_tokens == generated:
                kv.preempt()
                if evicted:
                    manager.blocks.clear_inactive()
                    executor.buffer.pages.fill_(float("nan"))
                kv.match_prefix()
                said.append(prefill())
                continue
            kv.schedule_decode()
            said.append(run(Step([], [Decode(said[-1], kv.view())], [Draw()])))
            kv.apply_decode(said[-1])
    assert said == alone(prompt)


def test_cold_and_warm_prompts_share_a_step() -> None:
    warm, cold = prompt_of(1, 40), prompt_of(2, 37)
    engine = engine_of()
    generate(engine, warm)
    assert generate(engine, warm, cold) == [alone(warm), alone(cold)]


def test_salted_prompts_share_no_pages() -> None:
    prompt = prompt_of(1, 40)
    engine = engine_of()
    for salt in ("", "a", "b"):
        engine.submit(Request(f"salt {salt}", prompt, 2, salt=salt))
        assert engine.run()[0].cached_tokens == 0
    engine.submit(Request("again", prompt, 2, lora="x"))
    assert engine.run()[0].cached_tokens == 0


def test_the_same_run_twice_is_equal_to_the_bit() -> None:
    prompts = [prompt_of(seed, 20 + seed) for seed in range(4)]
    first, second = engine_of(dtype="bfloat16"), engine_of(dtype="bfloat16")
    assert generate(first, *prompts) == generate(second, *prompts)
    assert first.executor.buffer.pages.nan_to_num(3).equal(second.executor.buffer.pages.nan_to_num(3))  # type: ignore[attr-defined]


def test_more_page_references_than_pages_are_no_matter() -> None:
    """B8: twelve requests that share most of a pool of few blocks."""
    prompt = prompt_of(3, 33)
    engine = engine_of(page=16, blocks=16, seqs=12)
    generate(engine, prompt, max_tokens=2)
    assert generate(engine, *[prompt] * 12, max_tokens=14) == [alone(prompt, 14, page=16)] * 12


def test_a_short_chunk_is_as_many_decodes_of_the_same_pages() -> None:
    """What a captured step makes of it."""
    weights = random_weights(TINY, 7, CPU)
    manager = manager_of(TINY, 32)
    executors = [executor_of(TINY, manager, weights) for _ in range(2)]
    prompt = prompt_of(3, 21)
    with manager.request(prompt, 4) as kv, torch.inference_mode():
        kv.schedule_prefill(10)
        history = Step([Chunk(np.array(prompt[:10]), kv.view())], [], [Draw()])
        for executor in executors:
            executor.begin(history)
            executor.finish()
        kv.apply_prefill()
        kv.schedule_prefill(11)
        step = Step([Chunk(np.array(prompt[10:]), kv.view())], [], [Draw()])
        rows = convert_to_decodes(step)
        assert rows is not None
        assert rows.wanted == [10]
        one, other = (executor.buffer for executor in executors)
        a = batch_prefill(weights, step.chunks, one, executors[0].backend)
        b = batch_decode(weights, rows.decodes, other, executors[1].backend)[rows.wanted]
        assert (a - b).abs().max() <= 1e-5
        assert (one.pages.nan_to_num(9) - other.pages.nan_to_num(9)).abs().max() <= 1e-5
