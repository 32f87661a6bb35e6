"""The ten lives of a request on real pages: every step computes, and the rows that it writes are those of its view.

The same lives without memory behind them are in `tests/kv/test_request_lifecycle.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen3.building import CPU, OPEN, TINY, Poisoned, prompt_of
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.kv import KvCacheManager, KvView, KvViewDesc, RequestKv
from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.executor import Step, TorchExecutor
from understudy.qwen3.reference import ReferenceBackend
from understudy.qwen3.sampling import Draw
from understudy.qwen3.weights import random_weights

CONFIG = replace(TINY, num_layers=1)
WEIGHTS = random_weights(CONFIG, 7, CPU)


class Pages:
    """A manager and its pages, which are NaN until somebody writes them."""

    def __init__(self, blocks: int = 32) -> None:
        self.manager = KvCacheManager(blocks, CONFIG.layout(16))
        OPEN.append(self.manager)
        self.buffer = Poisoned(blocks, self.manager.layout, torch.float32, CPU)
        self.executor = TorchExecutor(WEIGHTS, self.buffer, ReferenceBackend(CONFIG, CPU))

    @property
    def free(self) -> int:
        return self.manager.available_blocks

    def written(self) -> set[tuple[int, int]]:
        """(page, row) of every row that holds keys and values."""
        rows = ~self.buffer.pages.isnan().flatten(4).any(-1).any(1).any(1)
        return {(int(page), int(row)) for page, row in rows.nonzero()}

    def prefill(self, kv: RequestKv) -> KvView:
        start = kv.computed_tokens
        kv.schedule_prefill(kv.prefill_target - start)
        view = kv.view()
        kv.apply_prefill(self._run(Step([Chunk(kv.tokens[start : view.seq_len], view)], [], [Draw()])))
        return view

    def decode(self, kv: RequestKv) -> KvView:
        kv.schedule_decode()
        view = kv.view()
        kv.apply_decode(self._run(Step([], [Decode(int(kv.tokens[-1]), view)], [Draw()])))
        return view

    def _run(self, step: Step) -> int:
        (view,) = [chunk.view for chunk in step.chunks] + [decode.view for decode in step.decodes]
        before = self.written()
        first = view.seq_len - (len(step.chunks[0].tokens) if step.chunks else 1)
        self.executor.begin(step)
        (token,) = self.executor.finish().tokens
        new = {(int(view.page_ids[at // 16]), at % 16) for at in range(first, view.seq_len)}
        assert self.written() == before | new
        return token


@pytest.fixture
def pages() -> Pages:
    return Pages()


def test_from_prefill_to_release(pages: Pages) -> None:
    assert (pages.manager.total_blocks, pages.free) == (32, 31)
    with pages.manager.request(prompt_of(1, 10), 6) as kv:
        assert kv.computed_tokens == 0
        view = pages.prefill(kv)
        assert (view.seq_len, view.num_pages, view.last_page_len) == (10, 1, 10)
        view.require_capacity(10)
        assert (kv.computed_tokens, kv.generated_tokens) == (10, 1)
        assert [pages.decode(kv).seq_len for _ in range(5)] == [11, 12, 13, 14, 15]
        assert (kv.generated_tokens, kv.finished) == (6, True)
    assert pages.free == 31


def test_several_share_the_capacity() -> None:
    pages = Pages(10)
    free = [pages.free]
    with pages.manager.request(prompt_of(1, 16), 16) as a, pages.manager.request(prompt_of(2, 16), 1) as b:
        for kv in (a, b):
            pages.prefill(kv)
            free.append(pages.free)
    assert free[0] > free[1] > free[2]
    assert pages.free == 9


def test_a_decode_crosses_into_the_next_page(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 16), 2) as kv:
        view = pages.prefill(kv)
        assert (view.num_pages, view.last_page_len) == (1, 16)
        view = pages.decode(kv)
        assert (view.seq_len, view.num_pages, view.last_page_len) == (17, 2, 1)


def test_a_descriptor_has_the_layout_and_the_buffer(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 5), 2) as kv:
        described = KvViewDesc(pages.prefill(kv), pages.buffer.layout, pages.buffer)
    assert (described.seq_len, described.last_page_len, described.view.num_pages) == (5, 5, 1)
    assert (described.layout.page_size, described.layout.num_layers) == (16, 1)
    assert described.buffer is pages.buffer
    assert pages.buffer.pages.nbytes == 32 * pages.buffer.layout.page_bytes


def test_the_padding_page_stays_the_same_and_is_never_written(pages: Pages) -> None:
    padding = pages.manager.padding_block
    with pages.manager.request(prompt_of(1, 40), 4) as kv:
        pages.prefill(kv)
        pages.decode(kv)
    assert pages.manager.padding_block == padding >= 0
    assert padding not in {page for page, _ in pages.written()}


def test_identical_prompts_have_pages_of_their_own_until_none_is_left() -> None:
    pages = Pages(4)
    held = [pages.manager.request(prompt_of(1, 16), 1) for _ in range(4)]
    for kv in held[:3]:
        pages.prefill(kv)
    assert pages.free == 0
    with pytest.raises(CapacityExhausted):
        held[3].schedule_prefill(16)
    for kv in held:
        kv.close()
    assert pages.free == 3


def test_a_schedule_without_an_apply_gives_its_pages_back_unwritten(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 32), 2) as kv:
        kv.schedule_prefill(32)
        assert pages.free == 29
    assert pages.free == 31
    assert not pages.written()


def test_a_view_knows_what_fits(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 8), 2) as kv:
        view = pages.prefill(kv)
    view.require_capacity(16)
    with pytest.raises(InvalidArgument):
        view.require_capacity(17)


def test_a_decode_view_is_one_longer_than_what_was_computed(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 10), 4) as kv:
        pages.prefill(kv)
        for _ in range(3):
            computed = kv.computed_tokens
            assert pages.decode(kv).seq_len == computed + 1


def test_a_prefill_view_covers_the_prompt(pages: Pages) -> None:
    with pages.manager.request(prompt_of(1, 20), 2) as kv:
        view = pages.prefill(kv)
    assert (view.seq_len, view.num_pages) == (20, 2)
    view.require_capacity(20)
    assert len(pages.written()) == 20
