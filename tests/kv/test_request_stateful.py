"""Several requests on one manager against the slow model, under random calls, good and bad."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kv.request_side_by_side import POLICIES, PolicyName, Requests
from model.side_by_side import DUPLICATES, DuplicatesName

OPERATIONS = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))
SEED = int(os.environ.get("UNDERSTUDY_SOAK_SEED", "0"))
COMBINATIONS = [(policy, duplicates) for policy in POLICIES for duplicates in DUPLICATES]
NUM_BLOCKS = 11

which = st.integers(0, 4)
lengths = st.integers(1, 18)
small = st.integers(0, 20)


class RequestMachine(RuleBasedStateMachine):
    policy: PolicyName = "lru"
    duplicates: DuplicatesName = "allow"

    @initialize(prefix_caching=st.sampled_from([True, True, True, False]))
    def start(self, prefix_caching: bool) -> None:
        self.requests = Requests(NUM_BLOCKS, self.policy, self.duplicates, prefix_caching=prefix_caching)

    @rule(word=small, length=lengths, max_output=small, salt=small)
    def new(self, word: int, length: int, max_output: int, salt: int) -> None:
        self.requests.new(word, length, max_output, salt)

    # ── What an engine does ──

    @rule(which=which, tokens=small)
    def schedule_next(self, which: int, tokens: int) -> None:
        self.requests.schedule_next(which, tokens)

    @rule(which=which, accepted=small)
    def apply_next(self, which: int, accepted: int) -> None:
        self.requests.apply_next(which, accepted)

    @rule(which=which, tokens=small)
    def step(self, which: int, tokens: int) -> None:
        self.requests.schedule_next(which, tokens)
        self.requests.apply_next(which, tokens)

    # ── Any call at any time ──

    @rule(which=which)
    def match_prefix(self, which: int) -> None:
        self.requests.match_prefix(which)

    @rule(which=which, tokens=small)
    def schedule_prefill(self, which: int, tokens: int) -> None:
        self.requests.schedule_prefill(which, tokens)

    @rule(which=which)
    def schedule_decode(self, which: int) -> None:
        self.requests.schedule_decode(which)

    @rule(which=which, tokens=small)
    def schedule_speculative(self, which: int, tokens: int) -> None:
        self.requests.schedule_speculative(which, tokens)

    @rule(which=which)
    def schedule_ahead(self, which: int) -> None:
        self.requests.schedule_ahead(which)

    @rule(which=which)
    def revert(self, which: int) -> None:
        self.requests.revert(which)

    @rule(which=which, token=st.sampled_from([None, 1, 2]))
    def apply_prefill(self, which: int, token: int | None) -> None:
        self.requests.apply_prefill(which, token)

    @rule(which=which, token=st.integers(0, 2))
    def apply_decode(self, which: int, token: int) -> None:
        self.requests.apply_decode(which, token)

    @rule(which=which, accepted=st.lists(st.integers(0, 1), max_size=8))
    def apply_speculative(self, which: int, accepted: list[int]) -> None:
        self.requests.apply_speculative(which, accepted)

    @rule(which=which)
    def preempt(self, which: int) -> None:
        self.requests.preempt(which)

    @rule(which=which)
    def close(self, which: int) -> None:
        self.requests.close(which)

    @rule(which=which)
    def drop(self, which: int) -> None:
        self.requests.drop(which)

    @rule()
    def clear_inactive(self) -> None:
        self.requests.clear_inactive()

    @invariant()
    def same(self) -> None:
        self.requests.compare()

    def teardown(self) -> None:
        if hasattr(self, "requests"):
            self.requests.finish()


@pytest.mark.parametrize(("policy", "duplicates"), COMBINATIONS)
def test_requests_behave_like_their_model(policy: PolicyName, duplicates: DuplicatesName) -> None:
    machine = type("Machine", (RequestMachine,), {"policy": policy, "duplicates": duplicates})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


# --- a seeded driver that gets further: short here, long under `make soak` ------------------------


def one_operation(requests: Requests, rng: random.Random) -> None:
    who, number = rng.randrange(8), rng.randrange(24)
    match rng.randrange(32):
        case 0 | 1 | 2:
            requests.new(rng.randrange(20), 1 + rng.randrange(24), rng.randrange(24), rng.randrange(20))
        case 3 | 4 | 5:
            requests.match_prefix(who)
        case n if n < 13:
            requests.schedule_next(who, number)
        case n if n < 21:
            if number % 3 == 0:
                requests.schedule_ahead(who)
            requests.apply_next(who, number)
        case 21:
            requests.schedule_prefill(who, number)
        case 22:
            requests.schedule_decode(who)
        case 23:
            requests.schedule_speculative(who, number)
        case 24 | 25:
            requests.revert(who)
        case 26:
            requests.apply_prefill(who, rng.choice([None, 1]))
        case 27:
            requests.apply_decode(who, rng.randrange(3))
        case 28:
            requests.apply_speculative(who, [1] * rng.randrange(6))
        case 29:
            requests.preempt(who)
        case 30:
            requests.close(who)
        case _:
            if rng.random() < 0.5:
                requests.drop(who)
            elif rng.random() < 0.3:
                requests.clear_inactive()


def drive(policy: PolicyName, duplicates: DuplicatesName, operations: int) -> None:
    rng = random.Random(f"{SEED} {policy} {duplicates}")
    evictions = 0
    while operations > 0:  # a fresh manager now and then: other sizes, with and without a cache
        requests = Requests(rng.randrange(2, 20), policy, duplicates, prefix_caching=rng.random() < 0.9)
        for _ in range(min(operations, 500)):
            one_operation(requests, rng)
            requests.compare()
        operations -= 500
        evictions += requests.manager.blocks.metrics().evictions
        requests.finish()
    assert evictions > 0


@pytest.mark.parametrize(("policy", "duplicates"), COMBINATIONS)
def test_requests_stay_equal_to_their_model(policy: PolicyName, duplicates: DuplicatesName) -> None:
    drive(policy, duplicates, 2000)


@pytest.mark.soak
@pytest.mark.skipif(OPERATIONS <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations")
@pytest.mark.parametrize(("policy", "duplicates"), COMBINATIONS)
def test_requests_stay_equal_to_their_model_for_long(policy: PolicyName, duplicates: DuplicatesName) -> None:
    drive(policy, duplicates, -(-OPERATIONS // len(COMBINATIONS)))
