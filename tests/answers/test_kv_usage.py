"""KV usage over time is the blocks that requests hold, from the begin of a step to the last byte of a copy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answers.kv_holdings import read_steps, sglang_holdings, vllm_holdings
from replay.building import single_turns
from understudy.api import replay
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant, Polynomial
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.workload import Workload

MS = 1_000_000
BLOCK = 16
BLOCKS = 2_000
SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))

Row = tuple[int, int, int, int]
"""Prompt tokens, outputs, arrival and abort in ms (-1: none)."""


def workload_of(rows: list[Row]) -> Workload:
    rows = sorted(rows, key=lambda row: row[2])
    aborts = [-1 if abort < 0 else abort * MS for *_, abort in rows]
    columns: dict[str, Any] = {} if max(aborts) < 0 else {"abort_after_ns": aborts}
    return single_turns(
        [prompt for prompt, *_ in rows],
        [output for _, output, *_ in rows],
        [arrival for _, _, arrival, _ in rows],
        trace_block_size=BLOCK,
        **columns,
    )


def below(block_ns: int, engine: VllmConfig | SglangConfig) -> TiersConfig:
    """A host that each block reaches alone, after `block_ns`; HiCache has rules of its own."""
    link: dict[str, Any] = {"down_gbps": 1.0, "up_gbps": 1.0}
    given: dict[str, Any] = {"kv_bytes_per_token": block_ns // BLOCK}
    if isinstance(engine, VllmConfig):
        link["offload_concurrency"] = 1
        given["offload"] = {"mode": "write_through", "offload_batch_size": 1}
    return TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 100_000, "link": link}], **given})


def measured(run: OfflineRun, worker: int, times: list[int]) -> list[int]:
    """The used blocks that the run reports from each of these times on."""
    columns = run.timeline
    mask = np.asarray(columns.sample_worker) == worker
    order = np.asarray(columns.sample_time_ns)[mask]
    used = np.asarray(columns.sample_used_blocks)[mask]
    assert (np.diff(order) >= 0).all()
    at = np.searchsorted(order, times, side="right") - 1
    return [int(used[place]) if place >= 0 else 0 for place in at]


def audit(rows: list[Row], engine: VllmConfig | SglangConfig, workers: int, block_ns: int | None) -> None:
    """Compare every worker's series, the mean of the report, and the run by fast-forward."""
    workload = workload_of(rows)
    how: dict[str, Any] = {"workers": workers, "tiers": None if block_ns is None else below(block_ns, engine)}
    run = run_offline(RunPlan(workload, engine, keep_steps=True, **how))
    timeline, steps = run.timeline, run.steps
    assert steps is not None
    holdings = sglang_holdings if isinstance(engine, SglangConfig) else vllm_holdings
    start, end = int(timeline.start_ns), int(timeline.end_ns)
    area = 0
    for worker in range(workers):
        held = holdings(timeline, read_steps(steps, worker), BLOCK, block_ns)
        times = sorted({start, end, *held.changes, *np.asarray(timeline.sample_time_ns).tolist()})
        expected = held.at(times)
        assert list(zip(times, measured(run, worker, times), strict=True)) == list(
            zip(times, expected, strict=True)
        )
        inside = [place for place, time_ns in enumerate(times) if start <= time_ns <= end]
        area += sum(expected[i] * (times[i + 1] - times[i]) for i in inside if times[i] < end)
    fast = run_offline(RunPlan(workload, engine, **how))
    assert fast.facts.digests["samples"] == run.facts.digests["samples"]
    if end > start:
        usage = replay(workload, engine, **how).kv.usage_mean
        assert usage == pytest.approx(area / (BLOCKS * workers * (end - start)), rel=1e-9, abs=1e-12)


ROWS = st.lists(
    st.tuples(
        st.integers(1, 600),
        st.integers(1, 40),
        st.sampled_from([0, 1, 7, 30, 100, 400, 2_000]),
        st.just(-1),
    ),
    min_size=1,
    max_size=7,
)
ABORTED = st.lists(
    st.tuples(
        st.integers(1, 600),
        st.integers(1, 40),
        st.sampled_from([0, 1, 7, 30, 100, 400]),
        st.sampled_from([-1, 0, 1, 4, 5, 6, 20]),
    ),
    min_size=1,
    max_size=7,
)
TIMES = st.sampled_from([Constant(5.0, 1.0), Constant(5.0, 5.0), Polynomial()])


def vllm(timing: Constant | Polynomial, *, seats: int = 8, budget: int = 4096) -> VllmConfig:
    return VllmConfig(
        block_size=BLOCK,
        num_gpu_blocks=BLOCKS,
        timing=timing,
        async_scheduling=False,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
    )


def sglang(timing: Constant | Polynomial, *, seats: int = 8) -> SglangConfig:
    return SglangConfig(
        block_size=BLOCK,
        num_gpu_blocks=BLOCKS,
        timing=timing,
        disable_overlap_schedule=True,
        max_num_seqs=seats,
    )


@given(rows=ABORTED, timing=TIMES, seats=st.sampled_from([1, 3, 8]), budget=st.sampled_from([64, 4096]))
@settings(max_examples=max(60, SOAK // 1000))
def test_vllm_holds_blocks_until_a_request_ends_or_is_aborted(
    rows: list[Row], timing: Constant | Polynomial, seats: int, budget: int
) -> None:
    audit(rows, vllm(timing, seats=seats, budget=budget), 2, None)


@given(
    rows=ABORTED,
    timing=TIMES,
    seats=st.sampled_from([1, 3, 8]),
    block_ns=st.sampled_from([160, 1_600_000, 32_000_000]),
)
@settings(max_examples=max(60, SOAK // 1000))
def test_vllm_holds_a_block_until_its_copy_has_landed(
    rows: list[Row], timing: Constant | Polynomial, seats: int, block_ns: int
) -> None:
    audit(rows, vllm(timing, seats=seats), 2, block_ns)


@given(rows=ROWS, timing=TIMES, seats=st.sampled_from([1, 3, 8]))
@settings(max_examples=max(60, SOAK // 1000))
def test_sglang_holds_pages_until_a_request_ends(
    rows: list[Row], timing: Constant | Polynomial, seats: int
) -> None:
    audit(rows, sglang(timing, seats=seats), 2, None)


@given(
    rows=ROWS,
    timing=TIMES,
    seats=st.sampled_from([1, 3, 8]),
    block_ns=st.sampled_from([160, 1_600_000, 32_000_000]),
)
@settings(max_examples=max(60, SOAK // 1000))
def test_sglang_holds_a_node_until_its_copy_has_landed(
    rows: list[Row], timing: Constant | Polynomial, seats: int, block_ns: int
) -> None:
    audit(rows, sglang(timing, seats=seats), 2, block_ns)


ENGINES: dict[str, VllmConfig | SglangConfig] = {
    "vllm": VllmConfig(block_size=BLOCK, num_gpu_blocks=BLOCKS, timing=Constant(5.0, 1.0)),
    "vllm, synchronous": vllm(Constant(5.0, 1.0)),
    "sglang": SglangConfig(block_size=BLOCK, num_gpu_blocks=BLOCKS, timing=Constant(5.0, 1.0)),
    "sglang, no overlap": sglang(Constant(5.0, 1.0)),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("abort_ms", [2, 5, 8])
def test_a_worker_whose_last_request_was_aborted_is_empty(name: str, abort_ms: int) -> None:
    # The second request keeps the run going on the other worker.
    workload = workload_of([(16_000, 1000, 0, abort_ms), (16, 3000, 0, -1)])
    run = run_offline(RunPlan(workload, ENGINES[name], workers=2))
    last = [
        (int(running), int(used))
        for worker, running, used in zip(
            run.timeline.sample_worker,
            run.timeline.sample_running,
            run.timeline.sample_used_blocks,
            strict=True,
        )
        if worker == 0
    ][-1]
    assert last == (0, 0)


@pytest.mark.parametrize("name", ENGINES)
def test_copies_that_land_while_a_worker_is_idle_free_their_blocks_then(name: str) -> None:
    # Ten requests, a minute apart; the link needs a second for each.
    workload = workload_of([(16_000, 10, 60_000 * row, -1) for row in range(10)])
    report = replay(workload, ENGINES[name], tiers=below(1_000_000, ENGINES[name]))
    alone = replay(workload, ENGINES[name])
    # At most a thousand blocks for a second each, of 2,000 blocks over the nine minutes.
    assert 0 < report.kv.usage_mean - alone.kv.usage_mean <= 10 * 1_000 / (BLOCKS * 540)
