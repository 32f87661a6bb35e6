"""The engine against the slow model of the scheduler: random scenarios line for line, and cancels in every state."""

from __future__ import annotations

import itertools
import os
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from msgspec.json import encode

from engines.building import engine_for, engine_profile, request_spec, submit_spec
from model.kvbm_scheduler import KvbmModel, model_for
from model.scenario_gen import random_scenario, with_adapters, with_bursts, with_caps, with_ends
from model.vllm_config import PROFILES, RECORDED, V0_31, Profile
from model.vllm_runs import run_scenario as run_model
from understudy.conformance import recorder
from understudy.conformance.submit import blocks_of
from understudy.workload import scenario as engine_scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.vllm_format import RequestSpec, Scenario
    from model.vllm_requests import Plan

SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
SEEDS = 20  # for each profile
FIXED = Profile("fixed", phantom_hit=False)
MS = 1_000_000


def assert_like_the_model(
    seed: int, profile: Profile, *changes: Callable[[Scenario, int], Scenario]
) -> dict[str, Any]:
    """Compare the text of every line; returns the last one, the totals."""
    scenario = random_scenario(seed, profile)
    for change in changes:
        scenario = change(scenario, seed)
    ours = recorder.run_scenario(
        msgspec.convert(scenario, engine_scenario.Scenario), engine_profile(profile), check=True
    )
    line: dict[str, Any] = {}
    for line, theirs in zip(ours, run_model(scenario, profile), strict=True):
        assert encode(line) == encode(theirs), f"seed {seed}, {profile.name}"
    end: dict[str, Any] = line["end"]
    return end


@pytest.mark.parametrize("profile", [*PROFILES, FIXED], ids=lambda profile: profile.name)
def test_random_scenarios_are_scheduled_as_the_model_does(profile: Profile) -> None:
    ends = [assert_like_the_model(seed, profile) for seed in range(SEEDS)]
    for total in ("preemptions", "cached_tokens", "removed_blocks"):
        assert any(end[total] for end in ends), total


def shared_scenario(seed: int, eviction: str) -> Scenario | None:
    """The scenario of that seed with the kvbm manager; None where the slow model would take too long."""
    scenario = random_scenario(seed)
    scenario["config"] |= {"kv_manager": "kvbm", "eviction_policy": eviction}
    return scenario if scenario["config"]["num_blocks"] <= 120 else None


def assert_shared_like_the_model(seed: int, eviction: str) -> dict[str, Any] | None:
    scenario = shared_scenario(seed, eviction)
    if scenario is None:
        return None
    model = KvbmModel(scenario["config"])
    ours = recorder.run_scenario(msgspec.convert(scenario, engine_scenario.Scenario), check=True)
    line: dict[str, Any] = {}
    for line, theirs in zip(ours, run_model(scenario, model=model), strict=True):
        assert encode(line) == encode(theirs), f"seed {seed}, {eviction}"
    end: dict[str, Any] = line["end"]
    return end


# multi_lru goes by estimates of a small sketch, which the model counts exactly; its order is tested with the policy.
@pytest.mark.parametrize("eviction", ["lineage", "lru"])
def test_random_scenarios_with_shared_blocks_are_scheduled_as_the_model_does(eviction: str) -> None:
    ends = [end for seed in range(40) if (end := assert_shared_like_the_model(seed, eviction)) is not None]
    for total in ("preemptions", "cached_tokens", "removed_blocks"):
        assert sum(end[total] > 0 for end in ends) > 3, total


@pytest.mark.parametrize("eviction", ["lineage", "lru"])
def test_random_scenarios_with_shared_blocks_and_random_cancels_stay_equal_to_the_model(
    eviction: str,
) -> None:
    for seed in range(20):
        if (scenario := shared_scenario(seed, eviction)) is not None:
            play_with_cancels(seed, RECORDED, scenario)


@pytest.mark.soak
@pytest.mark.skipif(SOAK <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations")
@pytest.mark.parametrize("eviction", ["lineage", "lru"])
def test_thousands_of_scenarios_with_shared_blocks_are_scheduled_as_the_model_does(eviction: str) -> None:
    for seed in range(1000, 1000 + SOAK // 500):
        assert_shared_like_the_model(seed, eviction)


@pytest.mark.parametrize("profile", [*PROFILES, FIXED], ids=lambda profile: profile.name)
def test_random_scenarios_with_speculation_are_scheduled_as_the_model_does(profile: Profile) -> None:
    ends = [assert_like_the_model(seed, profile, with_bursts) for seed in range(SEEDS)]
    for total in ("preemptions", "cached_tokens", "removed_blocks"):
        assert any(end[total] for end in ends), total


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_random_scenarios_with_aborts_and_ends_by_eos_are_scheduled_as_the_model_does(
    profile: Profile,
) -> None:
    for seed in range(SEEDS):
        assert_like_the_model(seed, profile, with_ends)


def test_random_scenarios_with_the_caps_of_v0_31_are_scheduled_as_the_model_does() -> None:
    for seed in range(2 * SEEDS):
        assert_like_the_model(seed, V0_31, with_caps, *([with_ends] if seed % 2 else []))


@pytest.mark.parametrize("profile", [V0_31, RECORDED], ids=lambda profile: profile.name)
def test_random_scenarios_with_adapters_are_scheduled_as_the_model_does(profile: Profile) -> None:
    for seed in range(2 * SEEDS):
        assert_like_the_model(seed, profile, with_adapters, *([with_ends] if seed % 2 else []))


@pytest.mark.soak
@pytest.mark.skipif(SOAK <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations")
@pytest.mark.parametrize("profile", [*PROFILES, FIXED], ids=lambda profile: profile.name)
def test_thousands_of_scenarios_are_scheduled_as_the_model_does(profile: Profile) -> None:
    for seed in range(1000, 1000 + SOAK // 500):
        assert_like_the_model(seed, profile, *([with_ends], [with_bursts], [])[seed % 3])


@pytest.mark.parametrize(("seed", "blocks"), [(0, 0), (137, 2), (597, 1), (1676, 3), (1990, 2)])
def test_hits_on_blocks_that_nobody_computed_are_counted_as_the_model_counts_them(
    seed: int, blocks: int
) -> None:
    scenario = random_scenario(seed)
    pair = Pair(scenario["config"])
    for step in range(200):
        for index, spec in enumerate(scenario["requests"]):
            if spec["arrival_step"] == step:
                pair.add(spec, index)
        pair.step()
    assert pair.engine.phantom_hit_blocks == pair.model.phantom_hit_blocks == blocks


# ── Cancels ──


class Pair:
    """An engine and its model, driven alike and compared after every half of a step."""

    def __init__(self, config: dict[str, Any], profile: Profile = RECORDED) -> None:
        self.engine = engine_for(config, profile)
        self.model = model_for(config, profile)
        self.names: list[str] = []
        self.plan: Plan | None = None
        self.now_ns = 0
        self.finished: list[int] = []
        self.outputs: list[int] = []

    def add(self, spec: RequestSpec, index: int) -> None:
        config = self.model.config
        number = submit_spec(self.engine, spec, index, config.block_size, config.max_model_len)
        assert number == len(self.names)
        self.names.append(spec["id"])
        self.model.add(spec, index)

    def begin(self) -> None:
        self.engine.begin_recorded_step(self.now_ns)
        self.plan = self.model._schedule()
        self.compare()
        assert self.engine.scheduled == [
            (self.names.index(request.id), count) for request, count in self.plan.scheduled.items()
        ]

    def end(self) -> None:
        assert self.plan is not None
        self.now_ns += MS
        records = self.engine.end_recorded_step(self.now_ns).finished
        self.finished += [record.id for record in records]
        self.outputs += [record.output_tokens for record in records]
        received: Plan | None = self.plan
        if self.model.config.async_scheduling:
            received, self.model._unreceived = self.model._unreceived, self.plan
        if received is not None:
            self.model._update(received)
        self.plan = None
        self.compare()

    def step(self) -> None:
        self.begin()
        self.end()

    def cancel(self, name: str) -> None:
        self.engine.cancel(self.names.index(name), self.now_ns)
        self.model.cancel(name)
        assert not self.engine.cancel(self.names.index(name), self.now_ns).finished
        self.compare()

    def compare(self) -> None:
        self.engine.check()
        self.model.check()
        names = self.names
        assert [names[r] for r in self.engine.running] == [r.id for r in self.model.running]
        assert [names[r] for r in self.engine.waiting_head(1000)] == [r.id for r in self.model.waiting]
        assert self.engine.free_blocks == self.model.pool.free_count()
        count = 4 if isinstance(self.model, KvbmModel) else 1000  # foreseeing evictions is slow there
        assert [b + 1 for b in self.engine.free_head(count)] == self.model.pool.free_head(count)

    def drain(self) -> None:
        """Play until nothing is left; the pool must be whole again."""
        for _ in itertools.takewhile(lambda _: not self.engine.idle, range(2000)):
            self.step()
        assert self.engine.idle
        assert self.engine.free_blocks == self.model.config.num_blocks - 1
        assert self.engine.num_waiting == 0


TIGHT = {"block_size": 4, "num_blocks": 9, "scheduler_reserve_full_isl": False}


def three_requests(pair: Pair) -> None:
    for index, name in enumerate("abc"):
        pair.add(request_spec(name, [[1 + 100 * index, 8]], 12), index)


BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WHEN = pytest.mark.parametrize("when", ["between steps", "in a step"])


@BOTH
@WHEN
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_a_cancelled_request_returns_its_blocks_at_once_and_the_others_finish(
    asynchronous: bool, when: str, victim: str, after: int
) -> None:
    pair = Pair({**TIGHT, "async_scheduling": asynchronous})
    three_requests(pair)
    for _ in range(after):
        pair.step()
    if when == "in a step":
        pair.begin()
        if victim in {request.id for request in pair.model.running + pair.model.waiting}:
            pair.cancel(victim)
        pair.end()
    elif victim in {request.id for request in pair.model.running + pair.model.waiting}:
        pair.cancel(victim)
    pair.drain()
    assert sorted(pair.finished) == [i for i, name in enumerate("abc") if name != victim]


@BOTH
@WHEN
def test_a_preempted_request_can_be_cancelled(asynchronous: bool, when: str) -> None:
    pair = Pair({**TIGHT, "async_scheduling": asynchronous})
    three_requests(pair)
    while not pair.engine.preemptions:
        pair.begin()
        if when == "in a step" and pair.engine.preempted:
            break
        pair.end()
    (victim,) = pair.engine.preempted
    assert pair.engine.waiting_head() == [victim]
    pair.cancel("abc"[victim])
    if when == "in a step":
        pair.end()
    pair.drain()
    assert victim not in pair.finished


@BOTH
def test_a_cancelled_head_of_the_queue_lets_the_next_one_in(asynchronous: bool) -> None:
    pair = Pair({**TIGHT, "scheduler_reserve_full_isl": True, "async_scheduling": asynchronous})
    pair.add(request_spec("holder", [[1, 8]], 12), 0)
    pair.step()
    pair.add(request_spec("large", [[200, 32]], 1), 1)
    pair.add(request_spec("small", [[300, 4]], 1), 2)
    pair.step()
    assert pair.engine.running == [0]
    pair.cancel("large")
    pair.step()
    assert pair.engine.admitted == [(2, False, 0)]
    pair.drain()


def test_a_finished_request_cannot_be_cancelled() -> None:
    engine = engine_for(TIGHT)
    done = submit_spec(engine, request_spec("a", [[1, 8]], 1), 0, 4)
    engine.begin_step(0)
    engine.end_step(MS)
    assert engine.take_finished() == [done]
    assert not engine.cancel(done, 2 * MS).finished


def test_a_request_whose_last_token_is_in_flight_is_freed_at_once_by_a_cancel() -> None:
    engine = engine_for({**TIGHT, "async_scheduling": True})
    gone = submit_spec(engine, request_spec("a", [[1, 8]], 2), 0, 4)
    engine.begin_step(0)
    assert engine.end_step(MS).tokens == [(gone, 1)]
    (record,) = engine.cancel(gone, MS).finished
    assert (record.reason, record.output_tokens, record.last_token_ns) == ("cancelled", 1, MS)
    assert (engine.running, engine.free_blocks, engine.idle) == ([], 8, False)
    engine.begin_step(MS)
    assert engine.batch == [(gone, 1)]  # it is computed once more
    effects = engine.end_step(2 * MS)
    assert (effects.tokens, effects.finished, engine.idle) == ([], [], True)


def test_to_cancel_a_request_that_was_never_submitted_does_nothing() -> None:
    assert not engine_for(TIGHT).cancel(0, 0).finished


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_random_scenarios_with_random_cancels_stay_equal_to_the_model(profile: Profile) -> None:
    for seed in range(SEEDS):
        play_with_cancels(seed, profile)
        play_with_cancels(seed, profile, bursts=True)


def play_with_cancels(
    seed: int, profile: Profile, scenario: Scenario | None = None, *, bursts: bool = False
) -> None:
    scenario = scenario or random_scenario(seed, profile)
    if bursts:
        scenario = with_bursts(scenario, seed)
    rng = Random(f"cancels {seed}")
    pair = Pair(scenario["config"], profile)
    for step in range(120):
        for index, spec in enumerate(scenario["requests"]):
            if spec["arrival_step"] == step:
                pair.add(spec, index)
        pair.begin()
        cancel_somebody(pair, rng)
        pair.end()
        cancel_somebody(pair, rng)
    for request in [*pair.model.running, *pair.model.waiting]:
        pair.engine.cancel(pair.names.index(request.id), pair.now_ns)
        pair.model.cancel(request.id)
    pair.drain()


def cancel_somebody(pair: Pair, rng: Random) -> None:
    candidates = pair.model.running + pair.model.waiting
    if candidates and rng.random() < 0.08:
        name = rng.choice(candidates).id
        assert pair.engine.cancel(pair.names.index(name), pair.now_ns).finished
        pair.model.cancel(name)
        pair.compare()


# ── Ends by EOS ──


def test_eos_after_max_tokens_is_refused_by_name() -> None:
    engine = engine_for(TIGHT)
    with pytest.raises(ValueError, match="request a: eos_at 9 is after max_tokens=8"):
        submit_spec(engine, {**request_spec("a", [[1, 8]], 8), "eos_at": 9}, 0, 4)
    with pytest.raises(ValueError, match="eos_at counts from 1"):
        engine.submit("a", 8, 8, blocks_of(np.arange(20, dtype=np.uint32), 4)[0], eos_at=0)
    assert engine.idle


@BOTH
def test_a_request_that_ends_by_eos_is_scheduled_once_more_only_asynchronously(asynchronous: bool) -> None:
    pair = Pair({**TIGHT, "async_scheduling": asynchronous})
    pair.add({**request_spec("a", [[1, 8]], 8), "eos_at": 2}, 0)
    turns = 0
    while not pair.engine.idle:
        pair.step()
        turns += bool(pair.engine.scheduled)
    assert turns == (3 if asynchronous else 2)
    assert pair.outputs == [2]
