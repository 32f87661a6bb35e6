"""An engine whose blocks are kept by runs decides as one that keeps them one by one, and publishes the same events."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from engines.building import MS, constant, engine_for, submit_scenario_request
from model.replay_gen import COLUMNS, random_case
from model.scenario_gen import random_scenario, with_adapters, with_bursts, with_ends
from model.vllm_config import PROFILES, Profile
from replay.test_handoff_tiers import engine_of, repeated
from replay.test_multi_connector import host_of
from replay.test_multi_connector import run as run_with_host
from understudy.errors import WrongState
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from pathlib import Path

    from model.vllm_format import Scenario
    from understudy.engines.vllm_config import VllmConfig

SEEDS = 24  # for each profile
CHANGES = (with_bursts, with_ends, with_adapters)


def free_list(scenario: Scenario, profile: Profile) -> str:
    """The name of vLLM's own order, which makes the engine keep blocks one by one."""
    caches = scenario["config"].get("enable_prefix_caching", True)
    appends = profile.free_order == "all_last" or (profile.free_order == "uncached_last" and not caches)
    return "vllm_append" if appends else "vllm"


def play(scenario: Scenario, profile: Profile, seed: int, **config: Any) -> list[Any]:
    """Step the scenario with random cancels and resets; what is seen after each half of a step."""
    rng = Random(f"runs {seed}")
    settings = {**scenario["config"], **config}
    engine = engine_for(settings, profile, constant(), check=seed % 4 == 0)
    engine.set_fast_forward(rng.random() < 0.5)
    seen: list[Any] = []

    def look() -> None:
        events = engine.peek_events()
        columns = [
            column.tolist()
            for column in (
                events.ids,
                events.kinds,
                events.starts,
                events.sole,
                events.sequence_hashes,
                events.local_hashes,
                events.parent_hashes,
                events.positions,
                events.generations,
            )
        ]
        seen.append(
            (
                columns,
                engine.scheduled,
                engine.admitted,
                engine.preempted,
                engine.pool,
                engine.free_head(5000),
                engine.phantom_hit_blocks,
                sorted(engine.resident_hashes()),
                sorted(engine.take_finished()),
            )
        )

    submitted = 0
    arrivals = sorted(range(len(scenario["requests"])), key=lambda i: scenario["requests"][i]["arrival_step"])
    for step in range(100):
        now_ns = engine.now_ns
        while arrivals and scenario["requests"][arrivals[0]]["arrival_step"] <= step:
            submit_scenario_request(engine, scenario, arrivals.pop(0))
            submitted += 1
        if submitted and rng.random() < 0.05:
            engine.cancel(rng.randrange(submitted), now_ns)
        if rng.random() < 0.02:
            engine.forget_cache(now_ns)
        if rng.random() < 0.2:
            engine.advance(now_ns + rng.randint(0, 6 * MS))
            look()
        if engine.in_step:
            engine.end_step(engine.now_ns)
        if engine.idle or engine.stuck:
            engine.skip_to(engine.now_ns + MS)
            continue
        engine.begin_step(engine.now_ns)
        look()
        if engine.in_step:
            engine.end_step(engine.now_ns)
        look()
    engine.check()
    return seen


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_random_schedules_and_events_are_those_of_single_blocks(profile: Profile) -> None:
    events = 0
    for seed in range(SEEDS):
        scenario = random_scenario(seed, profile)
        if change := (*CHANGES, None)[seed % 4]:
            scenario = change(scenario, seed)
        runs = play(scenario, profile, seed)
        blocks = play(scenario, profile, seed, eviction_policy=free_list(scenario, profile))
        for stop, (ours, theirs) in enumerate(zip(runs, blocks, strict=True)):
            assert ours == theirs, f"seed {seed}, {profile.name}: stop {stop}"
        events += sum(len(look[0][0]) for look in runs)
    assert events > 3_000


def replayed(seed: int, **changes: Any) -> OfflineRun | str:
    case = random_case(seed, **changes)
    if changes and not case.config.has_engine_eviction_order:
        return replayed(seed, eviction_policy="vllm_append")
    try:
        return run_offline(RunPlan(case.workload, case.config, **case.how))
    except WrongState as error:  # no progress
        return str(error)


def test_replays_have_the_columns_and_the_digest_of_those_by_single_blocks() -> None:
    evictions = 0
    for seed in range(100):
        runs, blocks = replayed(seed), replayed(seed, eviction_policy="vllm")
        if isinstance(runs, str) or isinstance(blocks, str):
            assert runs == blocks
            continue
        for name in COLUMNS:
            assert (getattr(runs.timeline, name) == getattr(blocks.timeline, name)).all(), (seed, name)
        assert runs.facts.digest == blocks.facts.digest
        evictions += runs.timeline.evictions
    assert evictions > 300


def with_single_blocks(engine: VllmConfig) -> tuple[VllmConfig, VllmConfig]:
    """The settings as they are, and with the name of vLLM's own order."""
    return engine, msgspec.structs.replace(engine, eviction_policy="vllm")


@pytest.mark.parametrize("host", [False, True], ids=["handoff", "handoff-and-offload"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_hand_offs_are_those_of_single_blocks(tmp_path: Path, asynchronous: bool, host: bool) -> None:
    evictions = 0
    for seed in range(4):
        workload = repeated(tmp_path, seed)
        tiers = host_of(300, 0.01) if host else None
        rule = "uncached:100" if seed % 2 else "always"
        runs, blocks = (
            run_with_host(workload, engine, tiers, 0.01, rule=rule, check=seed == 3)
            for engine in with_single_blocks(engine_of(40, asynchronous=asynchronous))
        )
        for name in COLUMNS:
            assert (getattr(runs.timeline, name) == getattr(blocks.timeline, name)).all(), (seed, name)
        assert runs.facts.digest == blocks.facts.digest
        evictions += runs.timeline.evictions
    assert evictions > 50


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_offload_and_its_events_are_those_of_single_blocks(tmp_path: Path, asynchronous: bool) -> None:
    events = 0
    for seed in range(3):
        workload = repeated(tmp_path, seed)
        logs = []
        for engine in with_single_blocks(engine_of(60, asynchronous=asynchronous)):
            plan = RunPlan(workload, engine, tiers=host_of(60, 0.1), events=True, check=seed == 2)
            run = run_offline(plan)
            assert run.kv is not None
            logs.append((run.facts.digest, list(run.kv.digests())))
            events += sum(1 for _ in run.kv.events(0, "raw"))
        assert logs[0] == logs[1]
    assert events > 1_000


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_reset_hands_blocks_out_in_the_order_of_single_blocks(profile: Profile) -> None:
    scenario = random_scenario(3, profile)
    orders = []
    for policy in ({}, {"eviction_policy": free_list(scenario, profile)}):
        engine = engine_for({**scenario["config"], **policy}, profile, constant(), check=True)
        ids = [submit_scenario_request(engine, scenario, i) for i in range(len(scenario["requests"]))]
        engine.advance(20 * MS)
        for request in ids:
            engine.cancel(request, engine.now_ns)
        for _ in range(4):  # a batch in flight, and one behind it
            if not engine.in_step and not engine.idle:
                engine.begin_step(engine.now_ns)
            if engine.in_step:
                engine.end_step(engine.now_ns)
        assert engine.idle
        assert engine.reset_caches(engine.now_ns)
        engine.check()
        orders.append((engine.free_head(5000), engine.pool, sorted(engine.resident_hashes())))
    assert orders[0] == orders[1]
    assert orders[0][2] == []
