"""A step in numbers: what it computes, from what, and what waits meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engines.building import MS, engine_for, request_spec, submit_spec
from understudy.errors import WrongState

if TYPE_CHECKING:
    from understudy import _core

CONFIG: dict[str, Any] = {"block_size": 4, "num_blocks": 101, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def engine_with(*requests: tuple[int, int], **settings: Any) -> _core.Engine:
    """An engine and the prompts and outputs, in tokens, of those who wait for it; no two share a prefix."""
    engine = engine_for(CONFIG | settings)
    for index, (prompt, output) in enumerate(requests):
        submit(engine, index, prompt, output)
    return engine


def submit(engine: _core.Engine, index: int, prompt: int, output: int) -> None:
    spec = request_spec(str(index), [[1000 * index + 1, prompt]], output)
    submit_spec(engine, spec, index, 4)


def begin(engine: _core.Engine, now_ms: int) -> _core.ForwardPass:
    engine.begin_step(now_ms * MS)
    return engine.forward_pass()


def test_a_prompt_alone() -> None:
    step = begin(engine_with((8, 1)), 0)
    assert (step.num_prefill_requests, step.sum_prefill_tokens, step.sum_prefill_kv_tokens) == (1, 8, 0)
    assert (step.num_decode_requests, step.sum_decode_kv_tokens) == (0, 0)
    assert step.wall_time_secs == pytest.approx(0.002)  # the prompt, and its token


def test_a_prompt_beside_a_request_that_decodes() -> None:
    engine = engine_with((8, 4))
    begin(engine, 0)
    engine.end_step(MS)
    submit(engine, 1, 4, 2)
    step = begin(engine, 1)
    assert (step.num_prefill_requests, step.sum_prefill_tokens) == (1, 4)
    assert (step.num_decode_requests, step.sum_decode_kv_tokens) == (1, 9)


def test_prompts_of_4_and_12_tokens_vary_by_16() -> None:
    step = begin(engine_with((4, 1), (12, 1)), 0)
    assert (step.num_prefill_requests, step.sum_prefill_tokens, step.var_prefill_length) == (2, 16, 16)


def test_a_prompt_in_two_chunks_is_as_long_in_both() -> None:
    engine = engine_with((16, 1), max_num_batched_tokens=8)
    steps = []
    for now_ms in range(2):
        steps.append(begin(engine, now_ms))
        engine.end_step((now_ms + 1) * MS)
    assert [step.sum_prefill_tokens for step in steps] == [8, 8]
    assert [step.sum_prefill_kv_tokens for step in steps] == [0, 8]
    assert [step.var_prefill_length for step in steps] == [0, 0]


def test_a_variance_is_that_of_the_population() -> None:
    lengths = (2, 4, 4, 4, 5, 5, 7, 9)
    step = begin(engine_with(*((length, 1) for length in lengths)), 0)
    assert step.sum_prefill_tokens == 40
    assert step.var_prefill_length == pytest.approx(4)


def test_who_waits_is_counted_by_whether_it_ever_ran() -> None:
    # Two requests fill the pool, so that the second gives way when the first grows.
    engine = engine_with((8, 8), (7, 8), num_blocks=5, max_num_seqs=2, scheduler_reserve_full_isl=False)
    submit(engine, 2, 5, 1)
    submit(engine, 3, 9, 1)
    step = begin(engine, 0)
    assert (step.num_queued_prefill, step.sum_queued_prefill_tokens) == (2, 14)
    assert step.var_queued_prefill_length == 4
    assert step.num_queued_decode == 0
    now_ms = 0
    while not engine.preempted:
        now_ms += 1
        engine.end_step(now_ms * MS)
        step = begin(engine, now_ms)
    assert step.num_queued_prefill == 2
    assert (step.num_queued_decode, step.var_queued_decode_kv_tokens) == (1, 0)
    assert step.sum_queued_decode_kv_tokens == 7 + engine.emitted(1)


def test_between_steps_there_is_no_forward_pass() -> None:
    engine = engine_with((8, 1))
    with pytest.raises(WrongState, match="forward_pass"):
        engine.forward_pass()
    begin(engine, 0)
    engine.end_step(MS)
    with pytest.raises(WrongState, match="forward_pass"):
        engine.forward_pass()
