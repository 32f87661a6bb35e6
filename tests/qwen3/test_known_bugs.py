"""Bugs that engines of this kind have had, by the numbers of their list. B1, B2 and B8 are tested where they belong
(`test_equal_tokens`, `test_scheduler`), B13 and its relatives in `test_host`, B12 is the block manager's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3.building import (
    CPU,
    TINY,
    alone,
    ends,
    engine_of,
    executor_of,
    generate,
    manager_of,
    prompt_of,
    whole,
)
from understudy.errors import InvalidArgument, UnderstudyError
from understudy.qwen3.backend import rotary_tables
from understudy.qwen3.batch import Batch, Chunk
from understudy.qwen3.forward import forward, unified_step
from understudy.qwen3.request import Request
from understudy.tokens import TokenBlocks


@pytest.mark.parametrize("length", [4, 5, 8, 21])
def test_b3_a_warm_prompt_alone_has_the_positions_of_a_cold_one(length: int) -> None:
    engine = engine_of()
    prompt = prompt_of(1, length)
    cold = generate(engine, prompt)
    assert generate(engine, prompt) == cold == [alone(prompt)]


def test_b4_the_window_is_the_models_and_is_an_admission_rule_of_its_own() -> None:
    cos, sin = rotary_tables(TINY, CPU)
    assert cos.shape == sin.shape == (TINY.max_positions, TINY.head_dim // 2)
    engine = engine_of(blocks=1000)  # room for far more than the window
    engine.submit(Request("long", prompt_of(1, 500), 13))
    (refused,) = engine.run()
    assert refused.finish_reason == "rejected"
    assert "window of 512" in str(refused.error)


def test_b5_the_token_behind_the_prompt_is_the_first_of_the_output() -> None:
    engine = engine_of()
    engine.submit(Request("one", prompt_of(1, 9), 1))
    outputs = engine.run()
    assert len(outputs) == 1
    assert ends(outputs) == {"one": "length"}
    whole(engine)


def test_b6_a_block_is_found_only_when_its_last_row_was_computed() -> None:
    """Ten tokens and six of output: the sixteenth is sampled and never fed."""
    engine = engine_of(page=16)
    prompt = prompt_of(1, 10)
    tokens = generate(engine, prompt, max_tokens=6)[0]
    names = TokenBlocks(prompt + tokens, 16).identities
    assert engine.scheduler.manager.blocks.prefix_length(names) == 0
    assert generate(engine, [*prompt, *tokens, 3]) == [alone([*prompt, *tokens, 3], page=16)]


def test_b7_a_chunk_that_ends_within_a_block_registers_none_of_it() -> None:
    manager = manager_of(TINY, 16, page=16)
    prompt = prompt_of(1, 33)
    names = TokenBlocks(prompt, 16).identities
    with manager.request(prompt, 4) as kv:
        kv.schedule_prefill(20)
        kv.apply_prefill()
        assert kv.registered_blocks == 1
        assert manager.blocks.prefix_length(names) == 1


def test_b9_a_step_of_prompts_and_decodes_has_no_logits_of_all_rows() -> None:
    manager = manager_of(TINY, 16)
    executor = executor_of(TINY, manager)
    with manager.request(prompt_of(1, 5), 4) as kv:
        kv.schedule_prefill(5)
        chunk = Chunk(np.array(prompt_of(1, 5)), kv.view())
        with pytest.raises(InvalidArgument, match="batch_prefill"):
            unified_step(executor.weights, [chunk], [], executor.buffer, executor.backend)


@pytest.mark.parametrize("caching", [True, False])
def test_b10_b11_the_same_prompt_again_fits_into_a_pool_that_it_nearly_fills(caching: bool) -> None:
    """Blocks that are computed again although a copy is there must not pin both."""
    engine = engine_of(blocks=8, caching=caching)  # seven usable, and a life of seven
    prompt = prompt_of(1, 20)
    first = generate(engine, prompt, max_tokens=9)
    for _ in range(3):
        assert generate(engine, prompt, max_tokens=9) == first
        whole(engine)


@torch.inference_mode()
def test_b14_the_head_is_one_product_for_the_whole_batch() -> None:
    manager = manager_of(TINY, 32)
    executor = executor_of(TINY, manager)
    held = [manager.request(prompt_of(seed, 6), 4) for seed in range(3)]
    for kv in held:
        kv.schedule_prefill(6)
    rows: list[int] = []

    class Counting(type(executor.backend)):  # type: ignore[misc]
        def normed_linear(self, x, residual, norm, weight):  # type: ignore[no-untyped-def]
            if weight is executor.weights.head:
                rows.append(len(residual))
            return super().normed_linear(x, residual, norm, weight)

    batch = Batch.build([Chunk(kv.tokens[:6], kv.view()) for kv in held], (), CPU)
    forward(executor.weights, batch, executor.buffer, Counting(TINY, CPU))
    assert rows == [3]
    for kv in held:
        kv.close()


def test_b15_what_is_restored_never_takes_blocks_that_were_promised() -> None:
    """One ledger: an admitted request draws its whole life, whoever else asks for blocks meanwhile."""
    manager = manager_of(TINY, 9)
    with manager.request(prompt_of(1, 8), 9) as kv:
        assert not manager.can_admit(16, 9, [kv])
        kv.schedule_prefill(8)
        kv.apply_prefill(1)
        with pytest.raises(UnderstudyError):
            manager.blocks.allocate(manager.available_blocks + 1)
        for _ in range(8):
            kv.schedule_decode()
            kv.apply_decode(1)
        assert kv.held_blocks == manager.lifetime_blocks(8, 9)
