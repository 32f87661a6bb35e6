"""Views and layouts: values that check themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from understudy.errors import ConfigError, InvalidArgument
from understudy.kv import KvLayout, KvView, KvViewDesc

QWEN3_4B = KvLayout(page_size=16, num_layers=36, kv_heads=8, head_dim=128)


def view(pages: Any, seq_len: Any, page_size: Any = 16) -> KvView:
    return KvView(pages, seq_len, page_size)


# --- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_a_view_has_exactly_the_pages_that_its_length_needs(page_size: int) -> None:
    for seq_len in range(130):
        pages = -(-seq_len // page_size)
        kv_view = view(range(pages), seq_len, page_size)
        assert kv_view.num_pages == pages
        if seq_len:  # what a kernel derives the length from
            assert (pages - 1) * page_size + kv_view.last_page_len == seq_len
            assert 1 <= kv_view.last_page_len <= page_size
        for wrong in {pages - 1, pages + 1} - {-1}:
            with pytest.raises(InvalidArgument, match=f"must have {pages} pages for seq_len={seq_len}"):
                view(range(wrong), seq_len, page_size)


@pytest.mark.parametrize(
    ("seq_len", "expected"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 1), (32, 16), (33, 1)]
)
def test_the_last_page_holds_what_is_left(seq_len: int, expected: int) -> None:
    assert view(range(-(-seq_len // 16)), seq_len).last_page_len == expected


@pytest.mark.parametrize(
    ("pages", "seq_len", "page_size", "field"),
    [
        ([0], 1, 0, "page_size"),
        ([0], 1, -16, "page_size"),
        ([0], 1, 2.0, "page_size"),
        ([], -1, 16, "seq_len"),
        ([0], 5.5, 16, "seq_len"),
        ([[0]], 1, 16, "page_ids"),
        (0, 1, 16, "page_ids"),
        ([-1], 1, 16, "page_ids"),
        ([1.7], 1, 16, "page_ids"),
        (["a"], 1, 16, "page_ids"),
        ([2**31], 1, 16, "page_ids"),
        (np.array([2**32 + 5]), 1, 16, "page_ids"),
        (np.array([2**63], dtype=np.uint64), 1, 16, "page_ids"),
    ],
)
def test_a_view_that_cannot_be_is_refused(
    pages: object, seq_len: object, page_size: object, field: str
) -> None:
    with pytest.raises(InvalidArgument, match=field):
        view(pages, seq_len, page_size)


def test_a_view_is_immutable_and_keeps_no_hold_on_its_source() -> None:
    source = np.array([5, 9], dtype=np.int32)
    kv_view = view(source, 20)
    source[:] = 0
    assert kv_view.page_ids.tolist() == [5, 9]
    assert kv_view.page_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        kv_view.page_ids[0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv_view.seq_len = 21  # type: ignore[misc]


def test_views_are_equal_by_what_they_show() -> None:
    assert view([5, 9], 20) == view(np.array([5, 9], dtype=np.int64), 20)
    assert hash(view([5, 9], 20)) == hash(view((5, 9), 20))
    different = {view([5, 9], 20), view([5, 9], 21), view([9, 5], 20), view([5, 9], 20, 10), view([5], 10)}
    assert len(different) == 5
    assert view([], 0) != "a view"


def test_positions_are_those_of_the_rows_that_a_step_writes() -> None:
    kv_view = view([5, 9], 20)
    assert kv_view.positions(3).tolist() == [17, 18, 19]
    assert kv_view.positions(20).tolist() == list(range(20))
    assert kv_view.positions(0).tolist() == []
    assert kv_view.positions(1).dtype == np.int32
    with pytest.raises(InvalidArgument, match=r"chunk must be in 0\.\.20"):
        kv_view.positions(21)
    with pytest.raises(InvalidArgument, match="chunk must be an int of at least 0"):
        kv_view.positions(-1)


def test_a_batch_of_views_flattens_to_what_paged_kernels_take() -> None:
    views = [view([5, 9], 20), view([3], 7), view([5, 2], 32)]  # page 5 is shared
    assert np.concatenate([v.page_ids for v in views]).tolist() == [5, 9, 3, 5, 2]
    assert np.cumsum([0] + [v.num_pages for v in views]).tolist() == [0, 2, 3, 5]
    assert [v.last_page_len for v in views] == [4, 7, 16]


def test_capacity_ends_with_the_last_page() -> None:
    view([1, 2], 20).require_capacity(32)
    with pytest.raises(InvalidArgument, match="33 tokens do not fit into 2 pages"):
        view([1, 2], 20).require_capacity(33)
    view([], 0).require_capacity(0)


def test_a_descriptor_needs_a_layout_with_the_same_pages() -> None:
    buffer = object()
    desc = KvViewDesc(view([4], 5), QWEN3_4B, buffer)
    assert (desc.seq_len, desc.last_page_len, desc.buffer) == (5, 5, buffer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        desc.buffer = None  # type: ignore[misc]
    with pytest.raises(InvalidArgument, match="pages of 8 tokens, the layout of 16"):
        KvViewDesc(view([4], 5, 8), QWEN3_4B, buffer)


# --- layouts --------------------------------------------------------------------------------------


def test_the_numbers_of_qwen3_4b() -> None:
    assert QWEN3_4B.kv_block_len == 16_384
    assert QWEN3_4B.layer_stride == 32_768
    assert QWEN3_4B.page_stride == 1_179_648
    assert QWEN3_4B.bytes_per_token == 147_456
    assert QWEN3_4B.page_bytes == 2.25 * 2**20


def test_a_shard_has_its_share_of_the_heads_and_the_same_pages() -> None:
    half = QWEN3_4B.shard(2)
    assert half == KvLayout(page_size=16, num_layers=36, kv_heads=4, head_dim=128)
    assert half.page_stride == 589_824
    assert half.page_bytes * 2 == QWEN3_4B.page_bytes
    assert QWEN3_4B.shard(1) == QWEN3_4B
    assert QWEN3_4B.shard(8).kv_heads == 1


@pytest.mark.parametrize("ranks", [0, -2])
def test_there_is_at_least_one_rank(ranks: int) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel must be an int of at least 1"):
        QWEN3_4B.shard(ranks)


@pytest.mark.parametrize("ranks", [3, 16])
def test_heads_are_not_split(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel={ranks} does not divide kv_heads=8"):
        QWEN3_4B.shard(ranks)


@pytest.mark.parametrize("field", ["page_size", "num_layers", "kv_heads", "head_dim", "dtype_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "16", None])
def test_a_layout_with_a_bad_number_names_it(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be an int of at least 1"):
        dataclasses.replace(QWEN3_4B, **{field: value})


def test_element_offsets_place_every_row_once() -> None:
    layout = KvLayout(page_size=4, num_layers=3, kv_heads=2, head_dim=5)
    page = np.arange(layout.page_stride)
    shaped = page.reshape(layout.num_layers, 2, layout.page_size, layout.kv_heads, layout.head_dim)
    for layer in range(3):
        for kv in range(2):
            start = layer * layout.layer_stride + kv * layout.kv_block_len
            assert shaped[layer, kv].ravel().tolist() == page[start : start + layout.kv_block_len].tolist()


# --- the budget -----------------------------------------------------------------------------------


def test_a_budget_buys_whole_blocks() -> None:
    block = QWEN3_4B.page_bytes
    assert QWEN3_4B.block_budget(10 * block, utilization=1) == 10
    assert QWEN3_4B.block_budget(10 * block - 1, utilization=1) == 9
    assert QWEN3_4B.block_budget(10 * block, utilization=0.5) == 5
    assert QWEN3_4B.block_budget(80 * 2**30) == int(80 * 2**30 * 0.85) // block == 30_947


def test_the_rank_with_the_least_memory_decides_for_all() -> None:
    block = QWEN3_4B.page_bytes
    assert QWEN3_4B.block_budget([90 * block, 40 * block, 70 * block], utilization=1) == 40
    assert QWEN3_4B.block_budget((7 * block,), utilization=1) == 7


def test_a_budget_without_room_for_a_request_is_an_error() -> None:
    block = QWEN3_4B.page_bytes
    assert QWEN3_4B.block_budget(2 * block, utilization=1) == 2
    for free in (0, block, 2 * block - 1, [90 * block, block]):
        with pytest.raises(ConfigError, match="at least 2 are needed"):
            QWEN3_4B.block_budget(free, utilization=1)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.0001, float("nan"), float("inf")])
def test_utilization_is_a_share(utilization: float) -> None:
    with pytest.raises(ConfigError, match="utilization"):
        QWEN3_4B.block_budget(2**34, utilization)


@pytest.mark.parametrize("free_bytes", [-1, [], [2**34, -1], [2**34, 1.5], 2.5e9, "much", None])
def test_free_bytes_are_whole_numbers(free_bytes: int) -> None:
    with pytest.raises(ConfigError, match="free_bytes"):
        QWEN3_4B.block_budget(free_bytes)
