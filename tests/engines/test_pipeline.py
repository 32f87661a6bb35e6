"""Pipeline parallelism: batches in flight, the time of each stage, and what it does not work with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.building import MS, engine_profile, submit_spec
from model.clock_loop import Seen
from model.pipeline_loop import PipelineLoop
from model.vllm_config import V0_31
from understudy import VllmConfig, _core
from understudy.conformance.submit import submit
from understudy.engines.timing import Constant
from understudy.errors import ConfigError
from understudy.timing.stages import divide_layers
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest

PROFILE = msgspec.structs.replace(engine_profile(V0_31), has_batch_queue=True)


def stages_timing(stages: list[tuple[int, int]]) -> _core.StepTiming:
    """Each stage takes (step_ns, per_token_ns)."""
    return _core.pipelined_timing(
        [
            _core.physical_timing({"step_ms": step_ns / MS, "token_ms": per_token_ns / MS})
            for step_ns, per_token_ns in stages
        ]
    )


def pipelined_engine(
    config: dict[str, Any], stages: list[tuple[int, int]], *, spaced: bool, check: bool = True
) -> _core.VllmEngine:
    """An engine with a scenario's settings and these stages."""
    scenario = msgspec.convert(config, ScenarioConfig)
    own = VllmConfig.from_dict({**scenario.settings(), "pipeline_parallel_size": len(stages)})
    native = own.native(events=True, check=check, profile=PROFILE)
    assert native is not None
    return _core.VllmEngine(native, stages_timing(stages))


def begin(engine: _core.VllmEngine, now: int) -> int:
    """Begin a step; return its end."""
    end = engine.begin_step(now).wake_ns
    return now if end is None else end


def play(scenario: dict[str, Any], *, spaced: bool) -> Seen:
    """Run the engine as its loop does: requests and aborts are read before each schedule and at each batch end."""
    config = msgspec.convert(scenario["config"], ScenarioConfig)
    engine = pipelined_engine(scenario["config"], scenario["stages"], spaced=spaced)
    seen, now = Seen(), 0
    to_come = sorted(enumerate(scenario["requests"]), key=lambda entry: entry[1]["t"])
    aborts = sorted(scenario["aborts"], key=lambda abort: abort["t"])
    numbers: dict[str, int] = {}
    names: dict[int, str] = {}

    def read_until(time: int) -> None:
        while to_come and to_come[0][1]["t"] <= time:
            index, raw = to_come.pop(0)
            plain = {name: value for name, value in raw.items() if name != "t"}
            request = msgspec.convert({**plain, "arrival_step": 0}, ScenarioRequest)
            numbers[request.id], _ = submit(engine, config, index, request)
            names[numbers[request.id]] = request.id
        while aborts and aborts[0]["t"] <= time and aborts[0]["id"] in numbers:
            engine.cancel(numbers[aborts.pop(0)["id"]], time)

    for _ in range(100_000):
        read_until(now)
        if engine.idle or engine.stuck:
            times = [entry[1]["t"] for entry in to_come[:1]]
            times += [abort["t"] for abort in aborts[:1]] if engine.stuck else []
            if not times:
                return seen
            now = max(now, min(times))
            continue
        end = begin(engine, now)
        batch = {names[request]: tokens for request, tokens in engine.batch}
        if batch:
            seen.trace.append((0, end, batch))
        read_until(end)
        for request, tokens in engine.end_step(end).tokens:
            name = names[request]
            seen.first.setdefault(name, end)
            seen.last[name] = end
            seen.n[name] = seen.n.get(name, 0) + tokens
        now = end
    raise AssertionError("no end")


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A few requests that come, end by EOS or are aborted at any time, in a small pool, on two to four stages."""
    block_size = draw(st.sampled_from([1, 4, 8]))
    priority = draw(st.booleans())
    config = {
        "block_size": block_size,
        "num_blocks": 1 + 32 // block_size + draw(st.integers(0, 24)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(5, 30)),
        "policy": "priority" if priority else "fcfs",
        "async_scheduling": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "max_model_len": draw(st.sampled_from([30, 131072])),
    }
    requests, aborts = [], []
    for index in range(draw(st.integers(1, 8))):
        limit, arrival = draw(st.integers(1, 12)), draw(st.integers(0, 300))
        request = {
            "id": f"r{index}",
            "t": arrival,
            "prompt": [[draw(st.sampled_from([1, 1, 1000 * index + 500])), draw(st.integers(1, 20))]],
            "max_tokens": limit,
            "priority": draw(st.integers(0, 2)) if priority else 0,
        }
        if draw(st.booleans()):
            request["eos_at"] = draw(st.integers(1, limit))
        if draw(st.integers(0, 3)) == 0:
            aborts.append({"id": request["id"], "t": arrival + draw(st.integers(0, 200))})
        requests.append(request)
    stages = draw(st.lists(st.tuples(st.sampled_from([1, 7, 10]), st.integers(0, 2)), min_size=2, max_size=4))
    return {"stages": stages, "config": config, "requests": requests, "aborts": aborts}


@given(scenario=scenarios())
@settings(max_examples=80)
def test_every_batch_and_token_comes_when_the_model_says(scenario: dict[str, Any]) -> None:
    spaced = scenario["config"]["async_scheduling"]
    ours = play(scenario, spaced=spaced)
    assert ours == PipelineLoop(scenario, V0_31, spaced=spaced).run()


def end_times(
    prompts: list[int], stages: list[tuple[int, int]], *, asynchronous: bool, steps: int, budget: int = 100
) -> list[tuple[int, dict[int, int]]]:
    """Ends of the first batches in ms, with the tokens of each request."""
    config = {"num_blocks": 400, "max_num_batched_tokens": budget, "async_scheduling": asynchronous}
    engine = pipelined_engine(config, stages, spaced=asynchronous, check=False)
    for index, tokens in enumerate(prompts):
        spec: Any = {
            "id": str(index),
            "prompt": [[1000 * index, tokens]],
            "max_tokens": 50,
            "arrival_step": 0,
        }
        submit_spec(engine, spec, index, 16)
    found, now = [], 0
    for _ in range(steps):
        now = begin(engine, now)
        found.append((now // MS, dict(engine.batch)))
        engine.end_step(now)
    return found


TEN = (10 * MS, 0)


def test_chunks_of_a_prompt_fill_the_stages() -> None:
    ends = end_times([300], [TEN, TEN, TEN], asynchronous=False, steps=4)
    assert ends == [(30, {0: 100}), (40, {0: 100}), (50, {0: 100}), (80, {0: 1})]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lone_request_waits_for_every_stage_for_each_token(*, asynchronous: bool) -> None:
    ends = end_times([50], [TEN, TEN], asynchronous=asynchronous, steps=3)
    assert ends == [(20, {0: 50}), (40, {0: 1}), (60, {0: 1})]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_of_different_batches_share_the_pipeline(*, asynchronous: bool) -> None:
    ends = end_times([100, 100], [TEN, TEN], asynchronous=asynchronous, steps=6)
    assert [(end, set(batch)) for end, batch in ends] == [
        *((20, {0}), (30, {1}), (40, {0}), (50, {1}), (60, {0}), (70, {1}))
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_step_of_a_pipeline_is_fast_forwarded(*, asynchronous: bool) -> None:
    config = {"num_blocks": 400, "max_num_batched_tokens": 100, "async_scheduling": asynchronous}
    engine = pipelined_engine(config, [TEN, TEN], spaced=asynchronous)
    spec: Any = {"id": "0", "prompt": [[0, 50]], "max_tokens": 20, "arrival_step": 0}
    submit_spec(engine, spec, 0, 16)
    engine.advance(1_000 * MS)
    assert engine.idle
    assert engine.stepped == {"batches in the stages of a pipeline end at times of their own": 20}


def test_the_slowest_stage_sets_the_pace() -> None:
    ends = end_times([400], [TEN, (30 * MS, 0)], asynchronous=False, steps=4)
    assert [end for end, _ in ends] == [40, 70, 100, 130]


def test_times_of_whole_steps_are_divided_evenly() -> None:
    engine = VllmConfig(
        pipeline_parallel_size=4, timing=Constant(prefill_ms=40.0, decode_ms=0.0), async_scheduling=False
    )
    built = _core.VllmEngine(engine.native(), engine.native_timing())
    spec: Any = {"id": "0", "prompt": [[0, 6000]], "max_tokens": 2, "arrival_step": 0}
    submit_spec(built, spec, 0, 16)
    first = begin(built, 0)
    built.end_step(first)
    second = begin(built, first)
    assert (first, second) == (40 * MS, 50 * MS)


def test_layers_are_divided_as_vllm_divides_them() -> None:
    assert divide_layers(80, 2) == (40, 40)
    assert divide_layers(61, 2) == (31, 30)
    assert divide_layers(62, 4) == (15, 16, 16, 15)
    assert divide_layers(63, 4) == (16, 16, 16, 15)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=9 exceeds the 8 layers"):
        divide_layers(8, 9)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"vllm_version": "0.32"}, "the batch queue of vLLM 0.32 is not known; choose 0.33"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculation in the stages of a pipeline",
        ),
        ({"prefill_schedule_interval": 2}, "prefill_schedule_interval in the stages"),
        ({"decode_context_parallel_size": 2}, "context parallelism is not simulated"),
        ({"prefill_context_parallel_size": 2}, "context parallelism is not simulated"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        VllmConfig.from_dict({"pipeline_parallel_size": 2, **given})


def test_the_core_refuses_tiers_and_times_of_other_stages() -> None:
    timing = stages_timing([TEN, TEN])
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size=3 contradicts the times, which are those of 2"
    ):
        _core.VllmEngine(VllmConfig(pipeline_parallel_size=3).native(), timing)
    with pytest.raises(ConfigError, match="contradicts the times"):
        _core.VllmEngine(VllmConfig().native(), timing)
