"""An index behind a bad line: messages are lost, late, doubled, out of order, and publishers begin anew.

The line is played; the reader and the index are the real ones. Whatever happened, once the line is good again the index
holds what the publisher holds, and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.events import Consolidator
from understudy.events.dialects import dialect
from understudy.events.mirror import Mirror
from understudy.events.subscriber import Subscriber
from understudy.events.wire import BlockRemoved, BlockStored, WireBatch, WireEvent, encode_batch
from understudy.router import PrefixIndex

SIZE = 4
QUIET = 70  # messages in order, after which a reader believes anything again
DIALECT = dialect("vllm-0.32.0")
FATES = ("arrives", "arrives", "lost", "twice", "late")


class Engine:
    """A publisher that stores and removes blocks at random, with a ring of its last messages."""

    def __init__(self, seed: int, ring: int, dumps: bool) -> None:
        self._draw = np.random.default_rng(seed)
        self._ring_size, self._dumps = ring, dumps
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing is cached, and the sequence starts at 0."""
        self.held: dict[int, int | None] = {}  # hash: parent
        self.sequence = 0
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=self._ring_size)
        self.mirror = Mirror()

    def speak(self) -> tuple[int, bytes]:
        """The next message."""
        leaves = [name for name in self.held if name not in set(self.held.values())]
        event: WireEvent
        if leaves and self._draw.random() < 0.4:
            gone = int(self._draw.choice(leaves))
            del self.held[gone]
            event = BlockRemoved([gone], "GPU")
        else:
            parents = [None, *self.held]
            parent = parents[int(self._draw.integers(len(parents)))]
            name = int(self._draw.integers(1, 1 << 40))
            self.held[name] = parent
            tokens = [int(token) for token in self._draw.integers(0, 1 << 30, SIZE)]
            event = BlockStored([name], parent, tokens, SIZE, medium="GPU")
        self.mirror.apply([event])
        message = (self.sequence, encode_batch(WireBatch(0.0, [event], 0), DIALECT))
        self.ring.append(message)
        self.sequence += 1
        return message

    # What a replay client is answered.

    def fetch_since(self, start: int) -> list[tuple[int, bytes]]:
        return [message for message in self.ring if message[0] >= start]

    def fetch_dump(self) -> list[tuple[int, bytes]]:
        if not self._dumps or self.sequence == 0:
            return []
        return [(self.sequence - 1, encode_batch(WireBatch(0.0, list(self.mirror.dump()), 0), DIALECT))]

    def close(self) -> None:
        pass


class Follower:
    """The reader of one publisher and the index that it feeds."""

    def __init__(self, engine: Engine, *, replay: bool) -> None:
        self.subscriber = Subscriber("inproc://nobody")
        if replay:
            self.subscriber._client = engine  # type: ignore[assignment]
        self.index = PrefixIndex()
        self.was_cut = False
        self._truth = Consolidator()

    def hear(self, messages: list[tuple[int, bytes]]) -> None:
        if self.was_cut:
            self.was_cut = False
            self.subscriber._on_reconnect()
        self.subscriber._take(messages)
        out, self.subscriber._out = self.subscriber._out, []
        for columns in out:
            self.index.apply(3, self._truth.apply(columns))

    @property
    def held(self) -> set[int]:
        self.index.check()
        return set(self.index.dump(3).hashes.tolist())


acts = st.lists(st.one_of(st.sampled_from(FATES), st.sampled_from(["restart", "late comes"])), max_size=120)


def play(engine: Engine, follower: Follower, script: list[str]) -> None:
    late: deque[tuple[int, bytes]] = deque()
    for act in script:
        if act == "restart":  # which cuts the connection, and what was on its way is gone
            engine.begin_anew()
            late.clear()
            follower.was_cut = True
            continue
        if act == "late comes":
            if late:
                follower.hear([late.popleft()])
            continue
        message = engine.speak()
        if act == "late":
            late.append(message)
        elif act != "lost":
            follower.hear([message] * (2 if act == "twice" else 1))


@pytest.mark.parametrize("ring", [1, 3, 1000])
@given(script=acts, seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_what_the_line_did_is_mended_when_the_line_is(ring: int, script: list[str], seed: int) -> None:
    engine = Engine(seed, ring, dumps=True)
    follower = Follower(engine, replay=True)
    try:
        play(engine, follower, script)
        for _ in range(QUIET):
            follower.hear([engine.speak()])
        assert follower.held == set(engine.held)
        assert follower.subscriber.state == "live"
    finally:
        follower.subscriber.close()


@given(script=acts, seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_who_cannot_ask_again_knows_less_and_says_so(script: list[str], seed: int) -> None:
    engine = Engine(seed, 1000, dumps=False)
    follower = Follower(engine, replay=False)
    try:
        play(engine, follower, script)
        for _ in range(QUIET):
            follower.hear([engine.speak()])
        ghosts = follower.held - set(engine.held)
        assert not ghosts
        if follower.subscriber.state == "live":
            assert follower.held == set(engine.held)
    finally:
        follower.subscriber.close()


def test_a_line_that_does_nothing_costs_nothing() -> None:
    engine = Engine(0, 10, dumps=True)
    follower = Follower(engine, replay=True)
    try:
        for _ in range(200):
            follower.hear([engine.speak()])
            assert follower.held == set(engine.held)
        told: Any = follower.subscriber.counters
        assert (told.gaps, told.restarts, told.duplicates, told.dumped_messages) == (0, 0, 0, 0)
    finally:
        follower.subscriber.close()
