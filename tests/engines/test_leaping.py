"""Leaping over plain decode steps gives what single steps give: every decision, every event, every column."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np
import pytest

from engines.building import constant, engine_for, submit_scenario_request
from model.replay_gen import COLUMNS, random_case
from model.scenario_gen import random_scenario
from model.vllm_config import PROFILES, Profile
from understudy import _core
from understudy.engines.config import VllmConfig
from understudy.replay.offline import run_offline
from understudy.workload import Workload

SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
ENGINE_SEEDS = 300
FLEET_SEEDS = 250


# ── The engine: state and events after every stop ──


def play_engine(seed: int, profile: Profile, *, leaping: bool) -> list[Any]:
    """A random scenario on a random clock: arrivals and cancels fall where they may; what was seen at each stop."""
    scenario = random_scenario(seed, profile)
    rng = Random(f"clock {seed}")
    prefill_ms, decode_ms = rng.choice([(1.0, 1.0), (3.0, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
    timing = constant(prefill_ms, decode_ms)
    if rng.random() < 0.4:
        timing = _core.polynomial_timing()
    engine = engine_for(scenario["config"], profile, timing)
    engine.set_leaping(leaping)
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
        events = engine.drain_events()
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
            seen.append(engine.cancel(rng.randrange(len(submitted)), time_ns))
    play_to(engine.now_ns + 600_000_000)
    return seen


def assert_leaping_changes_nothing(seed: int, profile: Profile) -> None:
    single = play_engine(seed, profile, leaping=False)
    leapt = play_engine(seed, profile, leaping=True)
    for stop, (ours, theirs) in enumerate(zip(leapt, single, strict=True)):
        assert ours == theirs, f"seed {seed}, {profile.name}: stop {stop}"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_an_engine_that_leaps_is_at_every_stop_where_one_that_steps_is(profile: Profile) -> None:
    for seed in range(ENGINE_SEEDS // len(PROFILES)):
        assert_leaping_changes_nothing(seed * len(PROFILES) + PROFILES.index(profile), profile)


# ── The fleet: columns and digest ──


def assert_same_run(workload: Workload, config: VllmConfig, **how: Any) -> None:
    single = run_offline(workload, config, leaping=False, **how)
    leapt = run_offline(workload, config, leaping=True, **how)
    for name in COLUMNS:
        np.testing.assert_array_equal(
            getattr(leapt.timeline, name), getattr(single.timeline, name), err_msg=name
        )
    for name in ("steps", "evictions", "stored_blocks", "phantom_hit_blocks", "reject_reasons"):
        assert getattr(leapt.timeline, name) == getattr(single.timeline, name), name
    assert leapt.facts["digest"] == single.facts["digest"]
