"""Bugs that engines of this kind have had, by the numbers of their list. B1, B2 and B8 are tested on answers too
(`test_equal_tokens`, `test_scheduler`), B13 and its relatives in `test_host`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from qwen3.building import (
    CPU,
    OPEN,
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
from understudy.errors import InvalidArgument
from understudy.kv import KvView
from understudy.qwen3.arrays import StepArrays
from understudy.qwen3.batch import Batch, Chunk, Decode
from understudy.qwen3.build import _warm_up
from understudy.qwen3.engine import Engine
from understudy.qwen3.forward import forward, unified_step
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.memory import build_worst_step
from understudy.qwen3.options import EngineOptions
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.request import Output, Request
from understudy.qwen3.rotary import rotary_tables
from understudy.qwen3.scheduler import Scheduler
from understudy.timing.recorded.shapes import Shape
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy.qwen3.executor import Step


@pytest.mark.parametrize("prompt", range(14, 35))
def test_b1_a_view_has_the_pages_of_its_rows_and_no_other(prompt: int) -> None:
    manager = manager_of(TINY, 8, page=16)
    with manager.request(prompt_of(1, prompt), 20) as kv:
        kv.schedule_prefill(prompt)
        assert kv.view().num_pages == -(-prompt // 16)
        kv.apply_prefill(1)
        while not kv.finished:
            kv.schedule_decode()
            view = kv.view()
            assert (view.num_pages - 1) * 16 + view.last_page_len == view.seq_len
            assert manager.padding_block not in view.page_ids
            kv.apply_decode(1)


@pytest.mark.parametrize(("prompt", "output"), [(16, 17), (1, 16), (17, 16), (33, 100), (16, 1), (15, 2)])
def test_b2_a_life_draws_what_admission_reserved(prompt: int, output: int) -> None:
    """With exact views the last token is never written: ceil((prompt + output - 1) / page)."""
    manager = manager_of(TINY, 16, page=16)
    with manager.request(prompt_of(1, prompt), output) as kv:
        kv.schedule_prefill(prompt)
        kv.apply_prefill(1)
        while not kv.finished:
            kv.schedule_decode()
            kv.apply_decode(1)
        assert kv.held_blocks == manager.lifetime_blocks(prompt, output) == -(-(prompt + output - 1) // 16)


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


@pytest.mark.parametrize("longest", [128, 300, 4096])
def test_b4_no_step_before_the_first_request_reads_past_the_window(longest: int) -> None:
    """A budget may be larger than the window: then dry steps have several prompts."""
    options = EngineOptions(max_batched_tokens=1000, max_num_seqs=16)
    seen: list[Step] = [build_worst_step(options, longest)]
    assert sum(len(chunk.tokens) for chunk in seen[0].chunks) + len(seen[0].decodes) == 1000
    pages = np.concatenate([chunk.view.page_ids for chunk in seen[0].chunks])
    taken = [*pages.tolist(), *(int(decode.view.page_ids[0]) for decode in seen[0].decodes)]
    assert max(taken) < -(-1000 // 16) + 16 + 1
    executor = SimpleNamespace(begin=seen.append, finish=lambda: None)
    _warm_up(executor, options, longest, 0, 0, None)  # type: ignore[arg-type]
    assert len(seen) > 20
    for step in seen:
        assert len(step.draws) == len(step)
        assert all(len(chunk.tokens) <= chunk.view.seq_len <= longest for chunk in step.chunks)


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


def test_b8_the_arrays_of_a_captured_step_hold_every_reference_and_refuse_more() -> None:
    """Twelve requests that share four pages name 48 of them, of a pool of eight."""
    shape, pages = Shape(0, 16), np.array([3, 5, 2, 6], np.int32)
    arrays = StepArrays([shape], padding_block=7, max_pages=4, device=CPU)
    arrays.fill(shape, (), [Decode(1, KvView(pages, 16, 4))] * 12)
    batch = arrays.batch(shape)
    assert batch.page_ids[:48].tolist() == pages.tolist() * 12
    assert batch.page_indptr.tolist() == [*range(0, 49, 4), *range(49, 53)]
    with pytest.raises(ValueError, match="could not broadcast"):
        arrays.fill(shape, (), [Decode(1, KvView(np.arange(6, dtype=np.int32), 24, 4))] * 16)


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


def test_b12_registration_costs_a_page_the_same_wherever_it_lies() -> None:
    """Counted, not timed: a restore of a thousand blocks looks each of them up once."""
    manager = manager_of(TINY, 1100, page=4)
    names = TokenBlocks(np.arange(4000, dtype=np.uint32), 4).identities
    before = manager.blocks.metrics()
    with manager.blocks.allocate(1000).register(names) as held:
        after = manager.blocks.metrics()
        assert len(held) == after.registrations - before.registrations == 1000
    assert manager.blocks.prefix_length(names) == 1000


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
    """One ledger: who is admitted draws its whole life, and a prompt on the host waits until it fits beside that."""
    manager = manager_of(TINY, 14)
    executor = executor_of(TINY, manager)
    tier = HostTier(manager, PinnedPages(64, executor.buffer))
    engine = Engine(Scheduler(manager, SchedulerConfig(64, 8, 512), host=tier), executor)
    OPEN.append(engine)
    warm = prompt_of(1, 25)
    answer = generate(engine, warm, max_tokens=4)[0]
    tier.collect_ended()
    manager.blocks.clear_inactive()  # on the host alone now
    engine.submit(Request("long", prompt_of(2, 8), 29))  # nine blocks at its end, two at its beginning
    engine.submit(Request("warm", warm, 4))  # seven
    outputs: list[Output] = []
    while not any(output.finish_reason for output in outputs):
        assert engine.scheduler.restores is not None
        assert not engine.scheduler.restores.loading, "it would take what the long one still needs"
        outputs += engine.step()
    outputs += engine.run()
    assert ends(outputs) == {"long": "length", "warm": "length"}
    assert [output.token for output in outputs if output.request_id == "warm"] == answer
    assert tier.onboarded_blocks == 6
    whole(engine)
