"""Every duplicate policy with every eviction policy, against the slow model, under random operations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from model.side_by_side import DUPLICATES, POLICIES, DuplicatesName, PolicyName, SideBySide, world

NUM_BLOCKS = 9
CHAINS = world()
small = st.integers(0, 12)
picks = st.lists(small, max_size=6)


class ManagerMachine(RuleBasedStateMachine):
    policy: PolicyName = "lineage"
    duplicates: DuplicatesName = "allow"

    @initialize(reset_on_release=st.sampled_from([False, False, False, True]))
    def build(self, reset_on_release: bool) -> None:
        self.both = SideBySide(
            NUM_BLOCKS, self.policy, self.duplicates, CHAINS, reset_on_release=reset_on_release
        )

    # ── Fill ──

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        self.both.allocate(count)

    @rule(count=st.integers(1, 5), chain=small)
    def admit(self, count: int, chain: int) -> None:
        """What a request does: take the cached prefix, compute the rest."""
        self.both.match_prefix(self.both.prefix(chain, count))
        missing = count - len(self.both.registered[-1].blocks)
        if missing <= self.both.model.available():
            self.both.allocate(missing)
            self.both.register_direct(-1, self.both.prefix(chain, count)[-missing:])

    @rule(which=small, chain=small, length=small)
    def stage_a_prefix(self, which: int, chain: int, length: int) -> None:
        self.both.stage(which, self.both.prefix(chain, length))

    @rule(which=small, chosen=picks)
    def stage_anything(self, which: int, chosen: list[int]) -> None:
        self.both.stage(which, self.both.scattered(chosen))

    @rule(which=small)
    def unstage(self, which: int) -> None:
        self.both.unstage(which)

    @rule(which=small)
    def register_staged(self, which: int) -> None:
        self.both.register_staged(which)

    @rule(which=small, chain=small, length=small)
    def register_a_prefix(self, which: int, chain: int, length: int) -> None:
        self.both.register_direct(which, self.both.prefix(chain, length))

    @rule(which=small, chosen=picks)
    def register_anything(self, which: int, chosen: list[int]) -> None:
        self.both.register_direct(which, self.both.scattered(chosen))

    # ── Find ──

    @rule(chain=small, length=small)
    def match_prefix(self, chain: int, length: int) -> None:
        self.both.match_prefix(self.both.prefix(chain, length))

    @rule(chosen=picks)
    def match_scattered(self, chosen: list[int]) -> None:
        self.both.match_scattered(self.both.scattered(chosen))

    @rule(chosen=picks, touch=st.booleans())
    def scan(self, chosen: list[int], touch: bool) -> None:
        self.both.scan(self.both.scattered(chosen), touch=touch)

    @rule(chosen=picks, chain=small)
    def look(self, chosen: list[int], chain: int) -> None:
        self.both.look(self.both.scattered(chosen))
        self.both.look(self.both.prefix(chain, 5))

    @rule(chosen=picks)
    def touch(self, chosen: list[int]) -> None:
        self.both.touch(self.both.scattered(chosen))

    # ── Hold and let go ──

    @rule(which=small)
    def clone(self, which: int) -> None:
        self.both.clone(which)

    @rule(which=small, count=small)
    def take(self, which: int, count: int) -> None:
        self.both.take(which, count)
        self.both.take_mutable(which, count)

    @rule(which=small)
    def remember(self, which: int) -> None:
        self.both.remember(which)

    @rule(which=small)
    def upgrade(self, which: int) -> None:
        self.both.upgrade(which)

    @rule(which=small, value=st.booleans())
    def set_reset_on_release(self, which: int, value: bool) -> None:
        self.both.set_reset_on_release(which, value)

    @rule(which=small, tail_first=st.booleans())
    def release(self, which: int, tail_first: bool) -> None:
        self.both.release(which, tail_first=tail_first)

    @rule(which=small)
    def release_unregistered(self, which: int) -> None:
        self.both.release_mutable(which)
        self.both.release_staged(which)

    @rule()
    def clear_inactive(self) -> None:
        self.both.clear_inactive()

    # ── Watch ──

    @rule(limit=st.integers(0, 5))
    def drain_some_events(self, limit: int) -> None:
        self.both.drain_events(limit)

    @rule()
    def drain_all_events(self) -> None:
        self.both.compare_events()

    @rule(which=small, kind=small)
    def misuse(self, which: int, kind: int) -> None:
        self.both.misuse(which, kind)

    @invariant()
    def same(self) -> None:
        self.both.compare()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.compare_events()
            self.both.compare_uses()
            self.both.close()


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_manager_behaves_like_its_model(policy: PolicyName, duplicates: DuplicatesName) -> None:
    machine = type("Machine", (ManagerMachine,), {"policy": policy, "duplicates": duplicates})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
