"""Leaping over plain decode steps gives what single steps give: every decision, every event, every column."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np
import pytest

from engines.building import MS, constant, engine_for, request_spec, submit_scenario_request, submit_spec
from model.replay_gen import COLUMNS, Case, random_case
from model.scenario_gen import random_scenario
from model.vllm_config import PROFILES, RECORDED, Profile
from model.vllm_format import output_token
from replay.building import ONE_MS, single_turns
from understudy import _core
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.timing.coefficients import StepCoefficients

SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
ENGINE_SEEDS = 400
FLEET_SEEDS = 400


def physical(rng: Random) -> _core.StepTiming:
    """Step times with every term, and a window that requests pass or do not."""
    coefficients = StepCoefficients(
        weights_ms=0.5,
        token_ms=0.01,
        expert_ms=0.1,
        local_experts=8,
        expert_share=0.25,
        context_ms=0.0013,
        window_context_ms=0.0017,
        window=rng.choice([1, 12, 40, 100_000]),
        mix=1.5,
        attention_ms=1e-5,
        window_attention_ms=1e-5,
        step_ms=0.3,
        sequence_ms=0.01,
    )
    limits: dict[str, int] = rng.choice(
        [{}, {"most_requests": 2}, {"most_context_tokens": 60, "most_tokens": 10}]
    )
    return coefficients.build(**limits)


def op_tables(rng: Random) -> _core.StepTiming:
    """Step times of measured kernels: linear between points in every direction; uneven contexts cost more, or less."""

    def table(name: str, **axes: list[float]) -> _core.OpTable:
        points = 1
        for at in axes.values():
            points *= len(at)
        us = [rng.uniform(1, 900) for _ in range(points)]
        return _core.OpTable(name, (list(axes.items()), us), True)

    tokens, lengths, many = [1.0, 4.0, 64.0], [1.0, 16.0, 40.0, 300.0], [1.0, 2.0, 8.0]
    return _core.op_table_timing(
        layer=table("dense", tokens=tokens),
        once=table("dense", tokens=tokens),
        head=table("per_sequence", sequences=many),
        prompts=table("attention", chunk=tokens, history=lengths),
        decodes=table("attention", n=many, context=lengths),
        mixed=table("attention", chunk=tokens, history=lengths, n=many, context=lengths),
        experts=rng.choice([None, table("moe", tokens=tokens)]),
        layers=3,
        skew=rng.choice([0.0, 0.05, 0.6]),
        ranks=1,
        comm_ms=(0.1, 0.01, 0.002),
        captures=(1, 2, 4, 8),
    )


# ── The engine: state and events after every stop ──


def play_engine(seed: int, profile: Profile, *, fast_forward: bool, **config: str) -> list[Any]:
    """A random scenario on a random clock: arrivals and cancels fall where they may; what was seen at each stop."""
    scenario = random_scenario(seed, profile)
    scenario["config"] |= config
    rng = Random(f"clock {seed}")
    prefill_ms, decode_ms = rng.choice([(1.0, 1.0), (3.0, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
    timing = constant(prefill_ms, decode_ms)
    if rng.random() < 0.4:
        timing = rng.choice([_core.polynomial_timing(), physical(rng), physical(rng), op_tables(rng)])
    engine = engine_for(scenario["config"], profile, timing)
    engine.set_fast_forward(fast_forward)
    stretch = rng.choice([0, 1, 3, 20, 80]) * 1_000_000
    pending = sorted(
        (int(spec["arrival_step"] * stretch) + rng.randint(0, stretch), index)
        for index, spec in enumerate(scenario["requests"])
    )
    cancels = sorted(rng.randint(0, 40 * (stretch + 1_000_000)) for _ in range(rng.choice([0, 0, 5])))
    seen: list[Any] = []
    submitted: list[int] = []
    stop_on_finish = rng.random() < 0.5

    def look() -> None:
        events = engine.take_all_events()
        seen.append(
            (
                engine.now_ns,
                engine.in_step,
                engine.idle,
                engine.stuck,
                engine.running,
                engine.waiting_head(1000),
                engine.free_blocks,
                engine.free_head(1000),
                engine.take_finished(),
                engine.steps,
                engine.step_ns,
                engine.uncovered_ns,
                engine.preemptions,
                engine.phantom_hit_blocks,
                events.kinds.tolist(),
                events.sequence_hashes.tolist(),
                events.parent_hashes.tolist(),
            )
        )
        engine.check()

    def play_to(time_ns: int) -> None:
        for _ in range(5000):
            before = engine.now_ns, engine.steps
            engine.advance(time_ns, stop_on_finish)
            look()
            if not stop_on_finish or (engine.now_ns, engine.steps) == before:
                break
        if not engine.in_step:
            engine.skip_to(time_ns)

    moments = sorted([(time, 0, index) for time, index in pending] + [(time, 1, 0) for time in cancels])
    for time_ns, kind, index in moments:
        play_to(time_ns)
        if kind == 0:
            submit_scenario_request(engine, scenario, index)
            submitted.append(index)
        elif submitted:
            seen.append(not engine.cancel(rng.randrange(len(submitted)), time_ns).finished)
    play_to(engine.now_ns + 600_000_000)
    return seen


def assert_fast_forward_changes_nothing(seed: int, profile: Profile, **config: str) -> None:
    single = play_engine(seed, profile, fast_forward=False, **config)
    forwarded = play_engine(seed, profile, fast_forward=True, **config)
    for stop, (ours, theirs) in enumerate(zip(forwarded, single, strict=True)):
        assert ours == theirs, f"seed {seed}, {profile.name}: stop {stop}"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_an_engine_that_fast_forwards_is_at_every_stop_where_one_that_steps_is(profile: Profile) -> None:
    for seed in range(ENGINE_SEEDS // len(PROFILES)):
        assert_fast_forward_changes_nothing(seed * len(PROFILES) + PROFILES.index(profile), profile)


@pytest.mark.parametrize("eviction", ["lineage", "lru", "multi_lru"])
def test_an_engine_with_shared_blocks_fast_forwards_as_it_steps(eviction: str) -> None:
    for seed in range(ENGINE_SEEDS // 4):
        assert_fast_forward_changes_nothing(seed, RECORDED, kv_manager="kvbm", eviction_policy=eviction)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_a_waiting_prompt_is_admitted_in_the_step_that_generates_the_block_it_lacks(
    fast_forward: bool,
) -> None:
    # `first` generates what `second` quotes. It holds five of six blocks, `second` needs six; the four that it finds
    # are too few, the fifth is filled by the token that step 6 schedules.
    engine = engine_for({"block_size": 4, "num_blocks": 7}, timing=constant(0.0, 1.0))
    engine.set_fast_forward(fast_forward)
    first = submit_spec(engine, request_spec("first", [[1, 14]], 20), 0, 4)
    engine.advance(3 * MS + 1)
    quoted: list[int | list[int]] = [[1, 14], [output_token(0, 0), 6], [500, 4]]
    second = submit_spec(engine, request_spec("second", quoted, 1), 1, 4)
    engine.advance(6 * MS)
    assert (engine.running, engine.steps) == ([first], 6)
    engine.advance(9 * MS, stop_on_finish=True)
    assert engine.admitted == [(second, False, 20)]
    assert engine.take_finished() == [second]
    assert engine.now_ns == 7 * MS


# ── The fleet: columns and digest ──


def play(case: Case, *, fast_forward: bool) -> OfflineRun | str:
    """The run, or the error of one that makes no progress."""
    try:
        return run_offline(RunPlan(case.workload, case.config, fast_forward=fast_forward, **case.how))
    except WrongState as error:  # of which there is one: no progress
        return str(error)


def assert_same_run(case: Case) -> OfflineRun | None:
    """The run, None when both ways end with the same lack of progress."""
    single, forwarded = play(case, fast_forward=False), play(case, fast_forward=True)
    if isinstance(single, str) or isinstance(forwarded, str):
        assert single == forwarded
        return None
    for name in COLUMNS:
        np.testing.assert_array_equal(
            getattr(forwarded.timeline, name), getattr(single.timeline, name), err_msg=name
        )
    for name in ("steps", "evictions", "stored_blocks", "phantom_hit_blocks", "reject_reasons"):
        assert getattr(forwarded.timeline, name) == getattr(single.timeline, name), name
    assert forwarded.facts.digest == single.facts.digest
    return forwarded


@pytest.mark.parametrize("part", range(4))
def test_a_replay_that_fast_forwards_has_the_columns_and_the_digest_of_one_that_steps(part: int) -> None:
    preempted = 0
    for seed in range(part, FLEET_SEEDS, 4):
        run = assert_same_run(random_case(seed, single_turns=seed % 5 > 0))
        preempted += run is not None and int(run.timeline.preemptions.sum()) > 0
    assert preempted > 0


@pytest.mark.parametrize("eviction", ["lineage", "lru", "multi_lru"])
def test_a_replay_with_shared_blocks_has_the_digest_of_one_that_steps(eviction: str) -> None:
    preempted = 0
    for seed in range(FLEET_SEEDS // 4):
        case = random_case(seed, single_turns=seed % 5 > 0, kv_manager="kvbm", eviction_policy=eviction)
        run = assert_same_run(case)
        preempted += run is not None and int(run.timeline.preemptions.sum()) > 0
    assert preempted > 0


def test_a_request_lets_go_of_its_whole_chain_from_the_tail_so_that_lineage_and_lru_evict_alike() -> None:
    evictions = 0
    for seed in range(FLEET_SEEDS // 4):
        runs = [
            play(random_case(seed, kv_manager="kvbm", eviction_policy=eviction), fast_forward=True)
            for eviction in ("lineage", "lru")
        ]
        if isinstance(runs[0], str) or isinstance(runs[1], str):
            assert runs[0] == runs[1]
            continue
        assert runs[0].facts.digest == runs[1].facts.digest
        evictions += runs[0].timeline.evictions
    assert evictions > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fast_forward_takes_the_sum_of_its_steps_whatever_the_model(asynchronous: bool) -> None:
    forwarded = 0
    for seed in range(120):
        rng = Random(f"sums {seed}")
        timing = rng.choice([physical, op_tables])(rng)
        engines = []
        for fast_forward in (True, False):
            engine = engine_for(
                {"block_size": 4, "num_blocks": 400, "max_num_seqs": 9, "async_scheduling": asynchronous},
                timing=timing,
            )
            engine.set_fast_forward(fast_forward)
            engines.append(engine)
        for index in range(rng.randint(1, 6)):
            spec = request_spec(str(index), [[1000 * index + 1, rng.randint(1, 60)]], rng.randint(1, 60))
            for engine in engines:
                submit_spec(engine, spec, index, 4)
        fast, steps = engines
        fast.advance(10**12)
        # Step by step, each is asked for its own time.
        end_ns = 0
        while not steps.idle:
            steps.begin_step(end_ns)
            end_ns = steps.now_ns
            steps.end_step(end_ns)
        assert (fast.now_ns, fast.step_ns, fast.steps) == (end_ns, end_ns, steps.steps), seed
        forwarded += fast.steps
    assert forwarded > 1000


def test_a_prompt_that_waits_for_budget_only_is_admitted_after_the_step_that_used_it_up() -> None:
    # Without chunked prefill, the third prompt does not fit beside the second into step 0, but into step 1, and the
    # other two decode from then on: their steps must not be taken together.
    workload = single_turns([99, 200, 260], [30, 30, 2])
    config = VllmConfig(
        block_size=16,
        num_gpu_blocks=100,
        max_num_batched_tokens=370,
        enable_chunked_prefill=False,
        async_scheduling=False,
        timing=ONE_MS,
    )
    run = assert_same_run(Case(workload, config, {}))
    assert run is not None
    assert run.timeline.first_admit_ns.tolist() == [0, 0, MS]


def test_a_fast_forward_ends_where_the_next_request_arrives() -> None:
    workload = single_turns([10, 10], [50, 1], arrival_ms=[0, 20.5])
    run = assert_same_run(Case(workload, VllmConfig(timing=ONE_MS), {}))
    assert run is not None
    assert run.timeline.first_admit_ns.tolist() == [0, 21 * MS]


def test_a_timing_model_in_python_sees_the_same_batches() -> None:
    class Asked:
        def __init__(self) -> None:
            self.batches: set[tuple[int, int]] = set()

        def prefill_ms(self, *_: int) -> float:
            return 1.0

        def decode_ms(self, requests: int, context_tokens: int, *_: int) -> float:
            self.batches.add((requests, context_tokens))
            return 1.0

    for fast_forward in (False, True):
        asked = Asked()
        run_offline(RunPlan(single_turns([10, 20], [3, 5]), timing=asked, fast_forward=fast_forward))
        assert asked.batches == {(2, 30), (2, 32), (2, 34), (1, 23), (1, 24)}


@pytest.mark.soak
@pytest.mark.skipif(SOAK <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations")
def test_fast_forward_and_stepping_stay_together_for_long() -> None:
    for seed in range(10_000, 10_000 + SOAK // 100):
        assert_fast_forward_changes_nothing(seed, PROFILES[seed % len(PROFILES)])
        assert_same_run(random_case(seed, single_turns=seed % 5 > 0))
