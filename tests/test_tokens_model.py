"""TokenBlocks against the slow model, step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model import hashing
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from understudy.tokens import Identities

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@st.composite
def chunks_with_runs(draw: st.DrawFn) -> tuple[list[int], list[hashing.Run]]:
    tokens = draw(TOKENS)
    cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
    pairs = [(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
    runs = [(draw(st.integers(0, 2**64 - 1)), a, b - a) for a, b in pairs]
    return tokens, draw(st.permutations(runs))


class TokenBlocksMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 9), salt=st.integers(0, 2**64 - 1), first=chunks_with_runs())
    def start(self, size: int, salt: int, first: tuple[list[int], list[hashing.Run]]) -> None:
        tokens, runs = first
        self.model = hashing.TokenBlocks(size, salt)
        self.model.extend(tokens, runs)
        self.real = TokenBlocks(tokens, size, salt_hash=salt, mm_runs=runs)
        self.snapshots: list[tuple[Identities, list[int]]] = []

    @rule(token=st.integers(0, 2**32 - 1))
    def append(self, token: int) -> None:
        completed = self.model.extend([token])
        assert self.real.append(token) == (completed[0] if completed else None)

    @rule(chunk=chunks_with_runs(), as_array=st.booleans())
    def extend(self, chunk: tuple[list[int], list[hashing.Run]], as_array: bool) -> None:
        tokens, runs = chunk
        given = np.array(tokens, np.uint32) if as_array else tokens
        assert self.real.extend(given, runs) == self.model.extend(tokens, runs)

    @rule(length=st.integers(0, 100))
    def truncate(self, length: int) -> None:
        self.model.truncate(length)
        self.real.truncate(length)

    @precondition(lambda self: self.model.tokens)
    @rule()
    def pop(self) -> None:
        last = self.model.tokens[-1]
        self.model.truncate(len(self.model.tokens) - 1)
        assert self.real.pop() == last

    @rule()
    def take_snapshot(self) -> None:
        self.snapshots.append((self.real.identities, [b.lineage for b in self.model.blocks()]))

    @invariant()
    def equals_the_model(self) -> None:
        blocks = self.model.blocks()
        ids = self.real.identities
        assert self.real.tokens.tolist() == self.model.tokens
        assert self.real.mm_runs == self.model.runs
        assert (len(self.real), self.real.num_blocks) == (len(self.model.tokens), len(blocks))
        assert ids.lineage_hashes == [b.lineage for b in blocks]
        assert ids.local_hashes.tolist() == [b.local for b in blocks]
        assert [i.parent_hash for i in ids] == [b.parent for b in blocks]

    @invariant()
    def snapshots_never_change(self) -> None:
        for ids, expected in self.snapshots:
            assert ids.lineage_hashes == expected


TestTokenBlocksAgainstTheModel = TokenBlocksMachine.TestCase
