"""Waterfalls: the parts of a request's latency add up to it, and name the right causes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explain.random_runs import choose_arguments, record
from replay.building import crowd, single_turns
from understudy._core import Phase, RequestSpec, StepTable, constant_timing
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, UnderstudyError
from understudy.explain import SavedRun, Waterfall, Waterfalls
from understudy.explain.describe import explain_requests
from understudy.router.kv import KvRouting
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.step_columns import StepColumns
from understudy.tiers import TiersConfig
from understudy.workload import Lockstep

MS = 1_000_000
STEPS = Constant(prefill_ms=10.0, decode_ms=1.0)


def require_exact(run: SavedRun) -> int:
    """Check every request of a run; return how many there were."""
    waterfalls = Waterfalls(run)
    checked = 0
    for row in range(len(run)):
        waterfall = waterfalls.of(row)
        if waterfall is None:
            continue
        time = int(run.requests["arrival_ns"][row])
        for span in waterfall.spans:
            assert span.begin_ns == time
            assert sum(span.parts.values()) == span.end_ns - span.begin_ns
            assert min(span.parts.values()) > 0
            time = span.end_ns
        assert sum(waterfall.parts.values()) == waterfall.latency_ns == run.latency_ns[row]
        if waterfall.first_token_ns is not None:
            ttft = run.requests["first_token_ns"][row] - run.requests["arrival_ns"][row]
            assert sum(waterfall.ttft_parts.values()) == ttft
        checked += 1
    return checked


def explain(workload: Any, engine: Any, **how: Any) -> list[Waterfall]:
    run = record(workload, engine=engine, **how)
    require_exact(run)
    found = [Waterfalls(run).of(row) for row in range(len(run))]
    assert None not in found
    return [one for one in found if one is not None]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_parts_add_up_to_the_latency_of_every_request_of_random_runs(data: st.DataObject) -> None:
    workload, how = choose_arguments(lambda choices: data.draw(st.sampled_from(list(choices))))
    try:
        run = record(workload, **how)
    except UnderstudyError:  # settings that cannot serve this workload
        return
    require_exact(run)


@pytest.mark.parametrize(
    "engine", [VllmConfig(block_size=16, num_gpu_blocks=64), SglangConfig(block_size=16)]
)
def test_recording_steps_does_not_change_a_run(engine: Any) -> None:
    plain = run_offline(RunPlan(crowd(20), engine, workers=2))
    kept = run_offline(RunPlan(crowd(20), engine, workers=2, keep_steps=True))
    assert kept.facts.digest == plain.facts.digest
    assert kept.steps is not None
    assert len(kept.steps.step_begin_ns) == kept.timeline.steps


def test_a_request_alone_takes_its_own_time() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=64, timing=STEPS, async_scheduling=False)
    (one,) = explain(single_turns([32], 4), engine)
    assert set(one.parts) == {"prefill", "decode"}
    assert [span.kind for span in one.spans] == ["prefill", "decode"]
    assert one.spans[1].tokens == 3


def test_a_request_waits_for_the_blocks_of_another() -> None:
    # The first holds 3 of 5 blocks until its end; the second needs 4.
    engine = VllmConfig(
        block_size=16, num_gpu_blocks=5, timing=STEPS, async_scheduling=False, enable_prefix_caching=False
    )
    workload = single_turns([40, 60], [5, 2], arrival_ms=[0, 0.5])
    run = record(workload, engine=engine)
    first, second = (Waterfalls(run).of(row) for row in (0, 1))
    assert first is not None
    assert second is not None
    assert second.parts["step_in_progress"] == first.spans[0].end_ns - MS // 2
    assert second.parts["wait_blocks"] == first.spans[1].end_ns - first.spans[1].begin_ns
    waiting = next(
        span for span in explain_requests(run, [1])["requests"][0]["spans"] if span["kind"] == "wait_blocks"
    )
    assert [one["request"] for one in waiting["others"]] == ["0"]
    assert waiting["others"][0]["blocks"] == pytest.approx(43 / 16, abs=0.1)
    assert waiting["at_head_ns"] == waiting["duration_ns"]


def test_a_decode_is_lengthened_by_the_prompt_of_another() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=64, timing=STEPS, async_scheduling=False)
    first, second = explain(single_turns([16, 160], [5, 1], arrival_ms=[0, 11.5]), engine)
    assert first.parts["decode_prompts"] == 10 * MS
    assert "decode_prompts" not in second.parts


def test_a_preempted_request_waits_and_computes_its_tokens_again() -> None:
    engine = VllmConfig(
        block_size=4, num_gpu_blocks=9, timing=STEPS, async_scheduling=False, enable_prefix_caching=False
    )
    run = record(single_turns([12, 14], [16, 16], arrival_ms=[0, 0], trace_block_size=4), engine=engine)
    require_exact(run)
    assert run.requests["preemptions"].tolist() == [0, 1]
    second = Waterfalls(run).of(1)
    assert second is not None
    assert {"preempted", "recompute"} <= set(second.parts)
    said = explain_requests(run, [1])["requests"][0]["spans"]
    assert [span["preempted_by"] for span in said if span["kind"] == "preempted"] == ["0"]


def test_a_prefix_on_the_host_is_loaded() -> None:
    tiers = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 400, "link": {"down_gbps": 25, "up_gbps": 25}}],
            "kv_bytes_per_token": 1024,
        }
    )
    workload = single_turns(
        [320, 800, 320], arrival_ms=[0, 500, 1500], content=[range(20), range(100, 150), range(20)]
    )
    run = record(workload, engine=VllmConfig(block_size=16, num_gpu_blocks=60), tiers=tiers)
    require_exact(run)
    last = Waterfalls(run).of(2)
    assert last is not None
    assert last.parts["load"] > 0
    assert run.requests["loaded_g2"][2] > 0


def test_a_request_waits_in_the_router() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=400, max_num_batched_tokens=128, timing=STEPS)
    run = record(crowd(30), engine=engine, workers=2, routing=KvRouting(queue_threshold=0.1))
    assert require_exact(run) == 30
    waited = run.decisions["waited_ns"]
    slowest = int(run.decisions["rows"][np.argmax(waited)])
    waterfall = Waterfalls(run).of(slowest)
    assert waterfall is not None
    assert waterfall.parts["router_queue"] == waited.max() > 0


def test_a_prompt_computed_elsewhere_is_handed_over() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=64, timing=STEPS, async_scheduling=False)
    staged = Disaggregation(prefill_workers=1, decode_workers=1, kv_bytes_per_token=1000, link_gbps=0.01)
    run = record(single_turns([160, 160], 4, arrival_ms=[0, 1]), engine=engine, disaggregation=staged)
    assert require_exact(run) == 2
    first = Waterfalls(run).of(0)
    assert first is not None
    workers = [span.worker for span in first.spans]
    assert workers == sorted(workers)
    assert set(workers) == {0, 1}
    assert first.parts["handoff"] > 160 * 1000 / 0.01 - 1e6  # at 10 MB a second


def test_sglang_decodes_wait_while_prompts_are_computed() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=640, timing=STEPS, disable_overlap_schedule=True)
    first, _ = explain(single_turns([16, 160], [8, 1], arrival_ms=[0, 11.5]), engine)
    assert first.parts["not_scheduled"] > 0


def test_rows_of_an_unsorted_workload_are_those_of_the_workload() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=64, timing=STEPS)
    run = record(single_turns([16, 32, 48], [1, 2, 3], arrival_ms=[90, 0, 40]), engine=engine)
    assert require_exact(run) == 3
    assert np.bincount(run.steps.entry_request, minlength=3).min() > 0
    placed = run.steps.event_request[run.steps.event_kind == 0]
    assert placed.tolist() == [1, 2, 0]


def test_a_lockstep_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="lockstep"):
        run_offline(RunPlan(single_turns([16]), load=Lockstep(), keep_steps=True))


def test_an_engine_that_python_drives_is_recorded() -> None:
    config = SglangConfig(block_size=16, num_gpu_blocks=64).core_config(None, 64)
    engine = config.make_engine(constant_timing(10.0, 1.0))
    engine.watch_steps(True)
    table = StepTable()
    engine.submit(RequestSpec(0, "one", 32, 3), 0)
    table.place(0, 0, 0)
    now = 0
    while (effects := engine.begin_step(now)).phase == Phase.IN_STEP:
        table.record(0, engine, False, now)
        assert effects.wake_ns is not None
        now = effects.wake_ns
        engine.end_step(now)
        table.record(0, engine, True, now)
    assert table.num_steps == 3
    steps = StepColumns.take(table)
    assert steps.entry_tokens.tolist() == [32, 1]
    assert steps.step_end_ns[-1] == now
