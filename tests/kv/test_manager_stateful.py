"""Every duplicate policy with every eviction policy, against the slow model, under random operations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from model.driver import drive
from model.side_by_side import DUPLICATES, POLICIES, DuplicatesName, PolicyName, SideBySide
from model.world import world

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BLOCKS = 7
CHAINS = world()
small = st.integers(0, 12)
picks = st.lists(small, min_size=1, max_size=5)


def holding(*kinds: str) -> Callable[[Any], bool]:
    """The machine holds guards of one of these kinds."""
    return lambda machine: any(getattr(machine.both, kind) for kind in kinds)


class ManagerMachine(RuleBasedStateMachine):
    policy: PolicyName = "lineage"
    duplicates: DuplicatesName = "allow"
    both: SideBySide

    @initialize(
        reset_on_release=st.sampled_from([False, False, False, True]),
        warm=st.lists(st.tuples(small, st.integers(1, 5)), max_size=4),
    )
    def build(self, reset_on_release: bool, warm: list[tuple[int, int]]) -> None:
        """Most managers start with blocks in their cache."""
        self.both = SideBySide(
            NUM_BLOCKS, self.policy, self.duplicates, CHAINS, reset_on_release=reset_on_release
        )
        for chain, length in warm:
            self.serve(chain, length, True)

    # ── Whole requests ──

    def admit(self, chain: int, length: int) -> None:
        """Take the cached prefix, compute the rest if there is room."""
        wanted = self.both.prefix(chain, length)
        self.both.match_prefix(wanted)
        missing = wanted[len(self.both.registered[-1].blocks) :]
        if len(missing) <= self.both.model.available():
            self.both.allocate(len(missing))
            self.both.register_direct(-1, missing)

    @rule(chain=small, length=st.integers(1, 5))
    def start_request(self, chain: int, length: int) -> None:
        self.admit(chain, length)

    @rule(chain=small, length=st.integers(1, 5), tail_first=st.booleans())
    def serve(self, chain: int, length: int, tail_first: bool) -> None:
        held = len(self.both.registered)
        self.admit(chain, length)
        while len(self.both.registered) > held:
            self.both.release(-1, tail_first=tail_first)

    @rule(chain=small, length=st.integers(1, 5))
    def compute_anew(self, chain: int, length: int) -> None:
        """What is cached or in use already is computed a second time."""
        wanted = self.both.prefix(chain, length)
        if len(wanted) <= self.both.model.available():
            self.both.allocate(len(wanted))
            self.both.register_direct(-1, wanted)

    @precondition(holding("registered"))
    @rule(keep=st.integers(0, 2), tail_first=st.booleans())
    def finish_requests(self, keep: int, tail_first: bool) -> None:
        while len(self.both.registered) > keep:
            self.both.release(0, tail_first=tail_first)

    # ── Fill ──

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        self.both.allocate(count)

    @precondition(holding("mutable"))
    @rule(which=small, chain=small, length=small)
    def stage_a_prefix(self, which: int, chain: int, length: int) -> None:
        self.both.stage(which, self.both.prefix(chain, length))

    @precondition(holding("mutable"))
    @rule(which=small, chosen=picks)
    def stage_anything(self, which: int, chosen: list[int]) -> None:
        self.both.stage(which, self.both.scattered(chosen))

    @precondition(holding("staged"))
    @rule(which=small)
    def unstage(self, which: int) -> None:
        self.both.unstage(which)

    @precondition(holding("staged"))
    @rule(which=small)
    def register_staged(self, which: int) -> None:
        self.both.register_staged(which)

    @precondition(holding("mutable"))
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

    @precondition(holding("registered"))
    @rule(which=small)
    def clone(self, which: int) -> None:
        self.both.clone(which)

    @precondition(holding("registered", "mutable"))
    @rule(which=small, count=small)
    def take(self, which: int, count: int) -> None:
        self.both.take(which, count)
        self.both.take_mutable(which, count)

    @precondition(holding("registered"))
    @rule(which=small)
    def remember(self, which: int) -> None:
        self.both.remember(which)

    @precondition(holding("weak"))
    @rule(which=small)
    def upgrade(self, which: int) -> None:
        self.both.upgrade(which)

    @precondition(holding("registered"))
    @rule(which=small, value=st.booleans())
    def set_reset_on_release(self, which: int, value: bool) -> None:
        self.both.set_reset_on_release(which, value)

    @precondition(holding("registered"))
    @rule(which=small, tail_first=st.booleans())
    def release(self, which: int, tail_first: bool) -> None:
        self.both.release(which, tail_first=tail_first)

    @precondition(holding("mutable", "staged"))
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
def test_a_long_random_day_ends_as_in_the_model(policy: PolicyName, duplicates: DuplicatesName) -> None:
    rng = random.Random(f"{policy} {duplicates}")
    evictions = sum(drive(rng, policy, duplicates, 400).manager.metrics().evictions for _ in range(3))
    assert evictions > 20  # or the day was too quiet to show anything


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_manager_behaves_like_its_model(policy: PolicyName, duplicates: DuplicatesName) -> None:
    machine = type("Machine", (ManagerMachine,), {"policy": policy, "duplicates": duplicates})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
