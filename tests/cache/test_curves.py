"""Cache curves of the core against slow models, and against engines' own pools."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import cache_curves as model
from understudy import read_trace
from understudy._core import BlockVisits
from understudy.cache.curves import PINNED, POLICIES, CacheCurves
from understudy.errors import ConfigError, InvalidArgument
from understudy.kv import BlockManager
from understudy.workload import Workload
from understudy.workload.identities import row_identities

Policy = Literal["lineage", "multi_lru", "lru", "fifo"]
TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


@st.composite
def workloads(draw: st.DrawFn, *, whole_blocks: bool = False) -> Workload:
    """Requests that share prefixes of few ids; with `whole_blocks`, no prompt ends inside a block of 4."""
    trace_block = draw(st.sampled_from([4, 8]))
    shapes = st.tuples(st.integers(1, 40), st.integers(1, 12))
    rows = draw(st.lists(shapes, min_size=1, max_size=16))
    prompts = [-(-prompt // 4) * 4 if whole_blocks else prompt for prompt, _ in rows]
    counts = [-(-prompt // trace_block) for prompt in prompts]
    ids = draw(st.lists(st.integers(0, 1), min_size=sum(counts), max_size=sum(counts)))
    return Workload(
        arrival_ns=np.arange(len(rows)),
        prompt_tokens=np.array(prompts),
        output_tokens=np.array([output for _, output in rows]),
        hash_offsets=np.cumsum([0, *counts]),
        hash_ids=np.array(ids),
        trace_block_size=trace_block,
    )


def serial(rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    order = np.arange(rows, dtype=np.int64)
    return np.column_stack([order, ~order]).ravel()


@settings(max_examples=50, deadline=None)
@given(workload=workloads(), prompts_only=st.booleans(), warm_up=st.integers(0, 4), size=st.integers(1, 40))
def test_every_policy_hits_what_its_slow_model_hits(
    workload: Workload, prompts_only: bool, warm_up: int, size: int
) -> None:
    requests = model.requests_of(workload, 4, prompts_only=prompts_only)
    visits = BlockVisits(workload, 4, prompts_only)
    rows = np.arange(len(workload), dtype=np.int64)
    assert visits.visits == sum(len(request.blocks) for request in requests)
    assert visits.distinct == len({block for request in requests for block in request.blocks})
    assert visits.fifo(rows, [size], warm_up).tolist() == [model.fifo(requests, 4, size, warm_up)]
    assert visits.optimal(rows, [size], warm_up).tolist() == [model.optimal(requests, 4, size, warm_up)]
    if (
        prompts_only
    ):  # vLLM's rule keeps two copies of a block that is computed again; tests/workload compares it
        curve, distinct = visits.lru(rows, warm_up)
        assert curve[min(size, len(curve) - 1)] == model.lru(requests, 4, size, warm_up)
        assert distinct == visits.distinct


@settings(max_examples=40, deadline=None)
@given(workload=workloads(), data=st.data(), size=st.integers(1, 30))
def test_optimal_with_pinned_blocks_hits_what_its_slow_model_hits(
    workload: Workload, data: st.DataObject, size: int
) -> None:
    requests = model.requests_of(workload, 4, prompts_only=False)
    waiting = list(range(len(workload)))
    running: list[int] = []
    order: list[int] = []
    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            order.append(waiting.pop(0))
            running.append(order[-1])
        else:
            order.append(~running.pop(data.draw(st.integers(0, len(running) - 1))))
    hits, _ = BlockVisits(workload, 4).pinned("optimal", np.array(order, np.int64), [size])
    assert hits.tolist() == [model.pinned_optimal(requests, 4, order, size)]


@settings(max_examples=25, deadline=None)
@given(workload=workloads(), size=st.integers(1, 40))
def test_a_pool_with_lru_order_and_one_request_at_a_time_is_the_lru_curve(
    workload: Workload, size: int
) -> None:
    visits = BlockVisits(workload, 4, True)
    curve, _ = visits.lru(np.arange(len(workload), dtype=np.int64))
    for policy in ("lru", "lineage"):  # a prefix is released last, so the oldest block is always a leaf
        hits, _ = visits.pinned(policy, serial(len(workload)), [size])
        assert hits.tolist() == [curve[min(size, len(curve) - 1)]]


@settings(max_examples=25, deadline=None)
@given(workload=workloads(whole_blocks=True), extra=st.integers(0, 12))
@pytest.mark.parametrize("policy", typing.get_args(Policy))
def test_policies_evict_as_the_block_manager_does(policy: Policy, workload: Workload, extra: int) -> None:
    """Every prompt is of whole blocks and fits; blocks behind a gap are not counted, since copies differ there."""
    blocks = workload.prompt_tokens // 4
    size = int(blocks.max()) + extra
    manager = BlockManager(size, block_size=4, policy=policy, duplicates="reject")
    found = 0
    for row in range(len(workload)):
        identities = row_identities(workload, row, 4, int(blocks[row]))
        cached = manager.has_blocks(identities)
        matched = manager.match_prefix(identities)
        if cached.sum() > len(matched):  # the manager would compute a second copy
            matched.release()
            return
        found += len(matched)
        new = manager.allocate(len(identities) - len(matched)).register(identities[len(matched) :])
        new.release()
        matched.release()
    hits, unplaced = BlockVisits(workload, 4, True).pinned(policy, serial(len(workload)), [size])
    assert hits.tolist() == [4 * found]
    assert unplaced.tolist() == [0]


def test_larger_lru_and_optimal_caches_never_hit_less_and_optimal_bounds_all() -> None:
    curves = CacheCurves(read_trace(TRACE), 64)
    sizes = [1, 10, 100, 1_000, 10_000, 100_000]
    ratios = {name: curves.hit_ratio(name, sizes) for name in (*POLICIES, PINNED)}
    for name in ("lru", "optimal", "optimal_pinned"):
        assert np.all(np.diff(ratios[name]) >= 0), name
    for name, values in ratios.items():
        assert np.all(values <= ratios["optimal"] + 1e-12), name
    assert ratios["lru"][-1] == curves.unlimited_hit_ratio > 0


def test_several_workers_have_caches_of_their_own() -> None:
    import understudy

    workload = read_trace(TRACE)
    engine = understudy.VllmConfig(num_gpu_blocks=100_000, block_size=64)
    report = understudy.replay(workload, engine, workers=2)
    curves = CacheCurves(workload, 64, run=report.columns)
    assert len(curves.parts) == 2
    assert sum(len(part.rows) for part in curves.parts) == len(workload)
    # Unlimited caches hit what the run hit, but for blocks that were still being computed then.
    assert curves.routed_hit_ratio == pytest.approx(report.prefix_hit_ratio.first_admission, abs=0.02)


def test_prefix_runs_name_the_shared_prefix_and_what_is_recomputed() -> None:
    workload = Workload(  # three requests share 8 tokens, two of them 16
        arrival_ns=np.arange(3),
        prompt_tokens=np.array([16, 20, 16]),
        output_tokens=np.ones(3, np.int32),
        hash_offsets=np.array([0, 4, 9, 13]),
        hash_ids=np.array([1, 2, 3, 4, 1, 2, 3, 4, 5, 1, 2, 8, 9]),
        trace_block_size=4,
    )
    visits = BlockVisits(workload, 4, True)
    rows = np.arange(3, dtype=np.int64)
    row, position, blocks, requests, recomputed, below = visits.prefix_runs(rows, 100)
    assert (row.tolist(), position.tolist(), blocks.tolist()) == ([0, 0], [0, 2], [2, 2])
    assert (requests.tolist(), recomputed.tolist(), below.tolist()) == ([3, 2], [0, 0], [7, 3])
    assert visits.prefix_runs(rows, 1)[4].tolist() == [2, 2]  # a cache of one block keeps the first
    distinct, own = visits.session_blocks(np.array([0, 1, 1], np.int32))
    assert (distinct.tolist(), own.tolist()) == ([4, 7], [0, 3])


@pytest.mark.parametrize("order", [[0, 0, ~0, ~0], [0], [~0, 0], [0, ~0, 7, ~7]])
def test_an_order_in_which_a_row_does_not_begin_and_end_once_is_rejected(order: list[int]) -> None:
    visits = BlockVisits(read_trace(TRACE).head(3), 64)
    with pytest.raises(InvalidArgument, match=r"order|rows"):
        visits.pinned("lru", np.array(order, np.int64), [4])


def test_wrong_settings_are_rejected_by_name() -> None:
    workload = read_trace(TRACE).head(3)
    with pytest.raises(InvalidArgument, match="block_size must be at least 1"):
        BlockVisits(workload, 0)
    with pytest.raises(InvalidArgument, match="rows must lie in"):
        BlockVisits(workload, 64).lru(np.array([3]))
    with pytest.raises(ConfigError, match="policy 'clock' is not known"):
        BlockVisits(workload, 64).pinned("clock", serial(3), [4])
    with pytest.raises(ConfigError, match="warm_up must be a share from 0"):
        CacheCurves(workload, 64, warm_up=1.0)
    with pytest.raises(ConfigError, match="policies: 'clock' is not known"):
        CacheCurves(workload, 64).hit_ratio("clock", [4])
