"""Aborts in runs whose steps take no time: stepping and fast-forward give the same run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.building import MS, single_turns
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan


def test_a_request_that_is_aborted_when_it_arrives_begins_no_step() -> None:
    workload = single_turns([17], 2, abort_after_ns=[0])
    engine = VllmConfig(block_size=4, num_gpu_blocks=40, timing=Constant(prefill_ms=5.0, decode_ms=0.0))
    assert run_offline(RunPlan(workload, engine)).timeline.steps == 0


ROWS = st.lists(
    st.tuples(
        st.sampled_from([17, 20, 30]),
        st.sampled_from([1, 2, 5, 30]),
        st.sampled_from([0, 5, 7, 10, 15, 20]),
        st.sampled_from([-1, 0, 3, 5, 10, 12]),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


@given(
    rows=ROWS,
    prefill_ms=st.sampled_from([0.0, 5.0, 10.0]),
    decode_ms=st.sampled_from([0.0, 0.0, 5.0]),
    ahead=st.booleans(),
    sglang=st.booleans(),
    seats=st.sampled_from([1, 2, 8]),
    workers=st.integers(1, 2),
    routing=st.sampled_from(["round_robin", "least_loaded"]),
)
@settings(max_examples=50)
def test_fast_forward_gives_what_stepping_gives(
    rows: list[tuple[int, int, int, int, int]],
    prefill_ms: float,
    decode_ms: float,
    ahead: bool,
    sglang: bool,
    seats: int,
    workers: int,
    routing: str,
) -> None:
    workload = single_turns(
        [prompt for prompt, *_ in rows],
        [output for _, output, *_ in rows],
        arrival_ms=[arrival for _, _, arrival, *_ in rows],
        content=[[content, content + 1][: -(-prompt // 16)] for prompt, *_, content in rows],
        abort_after_ns=[-1 if abort < 0 else abort * MS for *_, abort, _ in rows],
    )
    timing = Constant(prefill_ms=prefill_ms, decode_ms=decode_ms)
    engine = (
        SglangConfig(
            block_size=4,
            num_gpu_blocks=60,
            max_num_seqs=seats,
            timing=timing,
            disable_overlap_schedule=not ahead,
        )
        if sglang
        else VllmConfig(
            block_size=4, num_gpu_blocks=40, max_num_seqs=seats, timing=timing, async_scheduling=ahead
        )
    )
    fast, stepped = (
        run_offline(RunPlan(workload, engine, workers=workers, routing=routing, fast_forward=fast))  # type: ignore[arg-type]
        for fast in (True, False)
    )
    assert fast.facts.digests == stepped.facts.digests
