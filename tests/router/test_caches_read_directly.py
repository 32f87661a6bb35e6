"""A router that nothing delays is shown what workers hold; one that keeps their events is told. Both know the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import ONE_MS, sessions, single_turns
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.router import KvRouting, Router
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop, Workload

BLOCK = 16


@st.composite
def crowds(draw: st.DrawFn) -> Workload:
    """Prompts that branch off a few others, in bursts, for caches that cannot keep them all."""
    count = draw(st.integers(2, 24))
    roots = draw(st.integers(1, 3))
    prompts, content, arrivals = [], [], []
    now_ms = 0.0
    for row in range(count):
        root, kept = draw(st.integers(0, roots - 1)), draw(st.integers(0, 6))
        own = draw(st.integers(0, 4))
        tail = draw(st.integers(1, BLOCK))
        ids = [1000 * root + i for i in range(kept)] + [10_000 + 100 * row + i for i in range(own + 1)]
        content.append(ids)
        prompts.append(BLOCK * (len(ids) - 1) + tail)
        now_ms += draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0, 20.0]))
        arrivals.append(now_ms)
    outputs = [draw(st.integers(1, 40)) for _ in range(count)]
    return single_turns(prompts, outputs, arrivals, content, trace_block_size=BLOCK)


def knows(run: OfflineRun) -> list[Any]:
    assert run.decisions is not None
    seen = run.decisions
    columns = (seen.rows, seen.time_ns, seen.worker, seen.cost, seen.overlap_blocks, seen.true_overlap_blocks)
    times = (run.timeline.first_token_ns, run.timeline.finish_ns, run.timeline.cached_tokens_first)
    return [column.tolist() for column in (*columns, seen.cost_regret, *times)]


@given(
    workload=crowds(),
    blocks=st.integers(24, 90),
    asynchronous=st.booleans(),
    manager=st.sampled_from(["native", "kvbm"]),
    timing=st.sampled_from([ONE_MS, Constant(prefill_ms=0.7, decode_ms=0.3), Constant(0.0, 0.0)]),
    batch=st.sampled_from([32, 64, 512]),
    threshold=st.sampled_from([None, None, 0.0, 1.0]),
    concurrency=st.sampled_from([None, None, 3]),
    fast_forward=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_looking_is_as_good_as_being_told_of_everything_at_once(
    workload: Workload,
    blocks: int,
    asynchronous: bool,
    manager: Any,
    timing: Constant,
    batch: int,
    threshold: float | None,
    concurrency: int | None,
    fast_forward: bool,
) -> None:
    engine = VllmConfig(
        block_size=BLOCK,
        num_gpu_blocks=blocks,
        max_num_batched_tokens=batch,
        async_scheduling=asynchronous,
        kv_manager=manager,
        timing=timing,
    )
    load = None if concurrency is None else ClosedLoop(concurrency)
    how: dict[str, Any] = {"workers": 3, "load": load, "routing": KvRouting(queue_threshold=threshold)}
    try:
        looked = knows(run_offline(RunPlan(workload, engine, fast_forward=fast_forward, **how)))
    except WrongState:  # this fleet preempts itself without end, whoever routes
        return
    assert looked == knows(run_offline(RunPlan(workload, engine, events=True, **how)))
    assert looked == knows(run_offline(RunPlan(workload, engine, check=True, **how)))


def test_turns_of_a_session_see_what_the_turns_before_left() -> None:
    turns = [[(40 + 24 * turn, 9, 5.0 * (turn % 2)) for turn in range(6)] for _ in range(12)]
    workload = sessions(*turns, arrival_ms=[3.0 * i for i in range(12)], quoted=True)
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=64, timing=ONE_MS)
    looked = run_offline(RunPlan(workload, engine, workers=4, routing="kv"))
    assert knows(looked) == knows(
        run_offline(RunPlan(workload, engine, workers=4, routing="kv", events=True))
    )
    assert looked.decisions is not None
    assert looked.decisions.overlap_blocks.sum() > 100


def test_what_a_step_in_progress_changes_is_not_seen_before_it_ends() -> None:
    # The first takes 4 ms to compute, and the second, of the same prompt, comes in the middle of that; the third after.
    workload = single_turns([64] * 3, 3, [0, 2, 6], [range(4)] * 3)
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=64, timing=Constant(prefill_ms=4.0, decode_ms=1.0))
    run = run_offline(RunPlan(workload, engine, workers=2, routing="kv"))
    assert run.decisions is not None
    assert run.decisions.overlap_blocks[:2].tolist() == [0, 0]
    assert run.decisions.best_overlap_blocks[2] == 4


def test_what_a_step_in_progress_evicts_is_there_until_it_ends() -> None:
    # Eight blocks: the second prompt takes them all, and while it is computed the first is still announced.
    content = [range(4), range(100, 108), range(4), range(4)]
    workload = single_turns([64, 120, 64, 64], 1, [0, 10, 12, 30], content)
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=8, timing=Constant(prefill_ms=4.0, decode_ms=1.0))
    run = run_offline(RunPlan(workload, engine, workers=1, routing="kv"))
    assert run.decisions is not None
    assert run.decisions.overlap_blocks.tolist()[:3] == [0, 0, 4]
    assert run.timeline.cached_tokens_first[2] == 0


class Told(Router):
    """Writes down, for every request, what it has been told before it was asked."""

    def __init__(self) -> None:
        self.before: list[tuple[int, list[tuple[str, int]]]] = []
        self.told: list[tuple[str, int]] = []

    def choose(self, request: Any, view: Any) -> int:
        self.before.append((request.row, sorted(self.told)))
        return int(request.row % len(view))

    def first_token(self, row: int) -> None:
        self.told.append(("first", row))

    def ended(self, row: int) -> None:
        self.told.append(("ended", row))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_wants_no_events_is_told_of_first_tokens_before_it_is_asked_again(asynchronous: bool) -> None:
    rng = np.random.default_rng(5)
    workload = single_turns(
        rng.integers(20, 200, 40).tolist(), rng.integers(1, 60, 40).tolist(), [2.5 * row for row in range(40)]
    )
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=400, timing=ONE_MS, async_scheduling=asynchronous)
    forwarded, stepped = Told(), Told()
    run_offline(RunPlan(workload, engine, workers=3, routing=forwarded))
    run_offline(RunPlan(workload, engine, workers=3, routing=stepped, fast_forward=False))
    assert forwarded.before == stepped.before
    assert any(what == "first" for what, _ in forwarded.before[10][1])
