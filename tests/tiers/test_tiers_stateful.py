"""A machine that does whatever one can do to an engine with tiers, beside its model."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tiers.pair import TierPair
from tiers.random_play import random_prompt, random_settings

if TYPE_CHECKING:
    from collections.abc import Sequence


class TieredEngine(RuleBasedStateMachine):
    """Submit, step, land, cancel and prefetch in any order; the pair compares after each."""

    @initialize(seed=st.integers(0, 2**16))
    def build(self, seed: int) -> None:
        config, tiers, profile = random_settings(Random(seed))
        self.pair = TierPair(config, tiers, profile)
        room = (self.pair.model.config.num_blocks - 1) * self.pair.model.config.block_size
        self.room = min(room, config["max_num_batched_tokens"])

    def alive(self) -> Sequence[int]:
        return sorted(self.pair.tokens)

    @precondition(lambda self: len(self.pair.tokens) < 6)
    @rule(seed=st.integers(0, 2**16), priority=st.integers(0, 2))
    def submit(self, seed: int, priority: int) -> None:
        prompt, outputs = random_prompt(Random(seed), self.room)
        self.pair.add(prompt, outputs, priority)
        self.pair.compare()

    @precondition(lambda self: not self.pair.in_step and not self.pair.engine.idle)
    @rule()
    def begin(self) -> None:
        self.pair.begin()

    @precondition(lambda self: self.pair.in_step)
    @rule(duration_ns=st.sampled_from([0, 1, 300, 1000, 5000]))
    def end(self, duration_ns: int) -> None:
        self.pair.end(duration_ns)

    @precondition(lambda self: not self.pair.in_step and not self.pair.engine.idle)
    @rule(duration_ns=st.sampled_from([0, 300, 1000]))
    def step(self, duration_ns: int) -> None:
        if self.pair.begin():
            self.pair.end(duration_ns)
        else:
            self.pair.wake()

    @rule(pause_ns=st.sampled_from([0, 1, 250, 999, 1000, 4000]))
    def land(self, pause_ns: int) -> None:
        self.pair.land(self.pair.now_ns + pause_ns)

    @precondition(lambda self: self.pair.engine.wake_ns is not None)
    @rule(early=st.booleans())
    def land_at_an_end(self, early: bool) -> None:
        wake = self.pair.engine.wake_ns
        assert wake is not None
        self.pair.land(max(self.pair.now_ns, wake - early))

    @precondition(lambda self: self.pair.tokens)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.pair.cancel(data.draw(st.sampled_from(self.alive())))

    @precondition(lambda self: self.pair.tokens)
    @rule(data=st.data(), blocks=st.integers(1, 6))
    def prefetch(self, data: st.DataObject, blocks: int) -> None:
        self.pair.prefetch(data.draw(st.sampled_from(self.alive())), blocks)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TestTieredEngine = TieredEngine.TestCase
TestTieredEngine.settings = settings(
    max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
