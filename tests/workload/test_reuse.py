"""What caches of every size find, computed in one pass, against engines of those sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy
from understudy._core import BlockVisits
from understudy.engines.vllm_config import VllmConfig
from understudy.workload import ClosedLoop, Workload
from understudy.workload.reuse import hit_curve


def found_by_an_engine(workload: Workload, block_size: int, blocks: int) -> float:
    """Tokens that a vLLM engine of so many blocks finds, one request at a time."""
    engine = VllmConfig(
        num_gpu_blocks=blocks,
        block_size=block_size,
        max_num_seqs=1,
        max_num_batched_tokens=8_192,
        watermark=0.0,
        async_scheduling=False,
    )
    report = understudy.replay(workload, engine, load=ClosedLoop(concurrency=1))
    return float(report.columns.cached_tokens_first.sum(dtype=np.int64))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    rows = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=25))
    trace_block = draw(st.sampled_from([4, 8, 12]))
    ids: list[int] = []
    offsets = [0]
    for prompt, _ in rows:
        ids += draw(
            st.lists(
                st.integers(0, 1), min_size=-(-prompt // trace_block), max_size=-(-prompt // trace_block)
            )
        )
        offsets.append(len(ids))
    return Workload(
        arrival_ns=np.zeros(len(rows), np.int64),
        prompt_tokens=np.array([prompt for prompt, _ in rows]),
        output_tokens=np.array([output for _, output in rows]),
        hash_offsets=np.array(offsets),
        hash_ids=np.array(ids),
        trace_block_size=trace_block,
    )


@settings(max_examples=30, deadline=None)
@given(workload=workloads(), extra=st.integers(0, 30), block_size=st.sampled_from([4, 8]))
def test_the_curve_says_what_one_engine_of_any_size_finds_in_order(
    workload: Workload, extra: int, block_size: int
) -> None:
    curve = hit_curve(workload, block_size)
    blocks = curve.smallest_blocks + extra
    expected = found_by_an_engine(workload, block_size, blocks)
    # A prompt of whole blocks that is all there is computed in its last block again: two copies, and the engine finds
    # the older one where the curve knows the younger. Each may shift the curve by a block.
    copies = int(np.count_nonzero(workload.prompt_tokens % block_size == 0))
    sizes = (max(blocks - 1 - copies, 0), blocks + copies)
    fewest, most = (round(curve.hit_ratio(size) * curve.prompt_tokens) for size in sizes)
    assert fewest <= expected <= most


def test_the_curve_is_right_to_a_block_where_no_block_has_two_copies() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        prompts = rng.integers(1, 60, 20, dtype=np.int32)
        prompts += prompts % 4 == 0
        counts = -(-prompts // 8)
        workload = Workload(
            arrival_ns=np.zeros(20, np.int64),
            prompt_tokens=prompts,
            output_tokens=rng.integers(1, 20, 20, dtype=np.int32),
            hash_offsets=np.concatenate(([0], np.cumsum(counts))),
            hash_ids=rng.integers(0, 2, int(counts.sum()), dtype=np.uint32),
            trace_block_size=8,
        )
        curve = hit_curve(workload, 4)
        blocks = curve.smallest_blocks + int(rng.integers(0, 30))
        expected = found_by_an_engine(workload, 4, blocks)
        fewest, most = (round(curve.hit_ratio(size) * curve.prompt_tokens) for size in (blocks - 1, blocks))
        assert fewest <= expected <= most


def test_a_cache_without_limits_finds_what_the_unlimited_bound_says() -> None:
    rows = 200
    workload = Workload(
        arrival_ns=np.arange(rows),
        prompt_tokens=np.full(rows, 64),
        output_tokens=np.full(rows, 4),
        hash_offsets=np.arange(rows + 1) * 4,
        hash_ids=np.random.default_rng(3).integers(0, 3, rows * 4, dtype=np.uint32),
        trace_block_size=16,
    )
    curve = hit_curve(workload, 16)
    hits = BlockVisits(workload, 16).unlimited(np.arange(rows, dtype=np.int64))
    assert curve.unlimited_hit_ratio * curve.prompt_tokens == pytest.approx(hits.sum())


def test_outputs_that_the_next_turn_quotes_are_found_there() -> None:
    workload = Workload(
        arrival_ns=np.zeros(2, np.int64),
        prompt_tokens=np.array([8, 24]),
        output_tokens=np.array([9, 1]),
        hash_offsets=np.array([0, 1, 4]),
        hash_ids=np.array([1, 1, 2, 3]),
        trace_block_size=8,
        session=np.zeros(2, np.int32),
        turn=np.array([0, 1]),
        output_in_next=np.array([True, False]),
    )
    # The first turn computes 16 tokens, all of which stand at the beginning of the second.
    assert hit_curve(workload, 8).hit_ratio(10) * 32 == 16
