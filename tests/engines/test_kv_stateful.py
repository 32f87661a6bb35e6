"""KV managers under random operations: against the slow model, and an index that knows only their events."""

from __future__ import annotations

import random
from collections import Counter
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

from engines.kv_building import admit, grow, send
from model.kv_manager import KvManager as Model
from model.kv_manager import NoRoom, NotHeld, PlainIndex, told
from understudy.errors import CapacityExhausted, UnknownBlock, WrongState
from understudy.kv.kv_manager import KvManager
from understudy.kv.sequence import ActiveSequence
from understudy.tokens import Identities, Identity

if TYPE_CHECKING:
    from understudy._core import BlockLease

NUM_BLOCKS = 7
BLOCK = 2
LIMITS = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def universe() -> list[Identity]:
    """A tree: a trunk of four blocks, two branches behind its second, and two other roots."""
    trunk = Identities.from_local_hashes([1, 2, 3, 4])
    branches = [Identities.from_local_hashes([10 * i, 10 * i + 1], parent=trunk[:2]) for i in (1, 2)]
    others = [Identities.from_local_hashes([100 * i, 100 * i + 1]) for i in (1, 2)]
    return [block for part in [trunk, *branches, *others] for block in part]


UNIVERSE = 12  # blocks in the tree
fulls = st.integers(0, UNIVERSE - 1)
names = st.one_of(fulls, st.integers(UNIVERSE, UNIVERSE + 3))  # the rest are partial blocks
lists = st.lists(names, min_size=1, max_size=6)


class KvbmMachine(RuleBasedStateMachine):
    eviction: Any = "lineage"

    @initialize()
    def build(self) -> None:
        self.tree = universe()
        self.kv = KvManager(NUM_BLOCKS, BLOCK, eviction=self.eviction, events=True)
        self.model = Model(NUM_BLOCKS, self.eviction)
        self.held: Counter[int] = Counter()
        self.raw = PlainIndex()
        self.true = PlainIndex()

    def blocks(self, numbers: list[int]) -> list[Identity | int]:
        return [self.tree[n] if n < UNIVERSE else n for n in numbers]

    def hold(self, numbers: list[int]) -> None:
        for n in numbers:
            self.held[n] = self.held[n] + 1 if n < UNIVERSE else 1

    @rule(numbers=lists)
    def acquire(self, numbers: list[int]) -> None:
        blocks = self.blocks(numbers)
        try:
            self.model.acquire(blocks)
        except NoRoom:
            with pytest.raises(CapacityExhausted):
                self.kv.acquire(blocks)
        else:
            assert self.kv.acquire(blocks) == len(blocks)
            self.hold(numbers)

    @rule(numbers=lists)
    def acquire_what_fits(self, numbers: list[int]) -> None:
        blocks = self.blocks(numbers)
        fit = self.model.fit(blocks)
        self.model.acquire(blocks[:fit])
        assert self.kv.acquire(blocks, partial=True) == fit
        self.hold(numbers[:fit])

    @rule(numbers=lists)
    def release_anything(self, numbers: list[int]) -> None:
        blocks = self.blocks(numbers)
        try:
            self.model.release(blocks)
        except NotHeld:
            with pytest.raises((UnknownBlock, WrongState)):
                self.kv.release(blocks)
        else:
            self.kv.release(blocks)
            self.held -= Counter(numbers)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        numbers = data.draw(st.permutations(sorted(self.held.elements())))
        self.release_anything(numbers[: data.draw(st.integers(1, len(numbers)))])

    @precondition(lambda self: any(n >= UNIVERSE for n in self.held))
    @rule(full=fulls, data=st.data())
    def seal(self, full: int, data: st.DataObject) -> None:
        partial = data.draw(st.sampled_from(sorted(n for n in self.held if n >= UNIVERSE)))
        self.model.seal(partial, self.tree[full])
        self.kv.seal(partial, self.tree[full])
        del self.held[partial]
        self.held[full] += 1

    @rule(full=fulls)
    def seal_nothing(self, full: int) -> None:
        with pytest.raises(UnknownBlock):
            self.kv.seal(99, self.tree[full])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, max_size=3, unique=True))
        self.model.discard(self.blocks(numbers))
        self.kv.discard(self.blocks(numbers))
        self.held -= Counter(numbers)

    @invariant()
    def agrees(self) -> None:
        self.kv.check()
        events = self.kv.drain_events()
        assert told(events.raw) == self.model.raw
        assert told(events.consolidated) == self.model.consolidated
        self.model.raw.clear()
        self.model.consolidated.clear()
        self.raw.apply(events.raw)
        self.true.apply(events.consolidated)
        resident = {block.sequence_hash for block in self.tree if self.kv.is_resident(block)}
        assert resident == self.true.resident == self.raw.resident
        assert self.kv.inactive_blocks == self.model.inactive()
        assert self.kv.active_blocks == NUM_BLOCKS - self.model.available()
        assert self.kv.active_references == self.model.active_references() == self.held.total()
        for block in self.blocks(list(range(UNIVERSE + 4))):
            assert self.kv.references(block) == self.model.holdings(block)
            assert self.kv.probe_new_blocks([block]) == self.model.is_new(block)


@pytest.mark.parametrize("eviction", ["lineage", "lru"])
def test_kvbm_does_what_the_model_does_and_its_index_is_right(eviction: str) -> None:
    machine = type("Machine", (KvbmMachine,), {"eviction": eviction})
    run_state_machine_as_test(machine, settings=LIMITS)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("eviction", ["lineage", "lru", "multi_lru"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_grow_and_are_preempted_tell_a_consistent_story(
    eviction: Any, caching: bool, seed: int
) -> None:
    """No block is stored behind one that is not here, and the index is the residency at every step."""
    rng = random.Random(seed)
    kv = KvManager(14, 4, eviction=eviction, events=True)
    index = PlainIndex(parents=True)
    running: list[ActiveSequence] = []
    seen: dict[int, Identity] = {}
    for _ in range(2000):
        choice = rng.random()
        if choice < 0.3 and len(running) < 6:
            shared = [rng.randrange(2)] * rng.choice([0, 4, 8, 10])
            prompt = shared + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
            running.append(
                ActiveSequence(
                    prompt, rng.randrange(1, 12), block_size=4, enable_prefix_caching=caching, rng=rng
                )
            )
        elif choice < 0.4 and running:
            send(kv, rng.choice(running).preempt())
        elif running:
            request = rng.choice(running)
            try:
                if request.allocated_tokens < len(request):
                    admit(kv, request, rng.randint(request.allocated_tokens, len(request)))
                else:
                    advance(kv, request)
            except CapacityExhausted:
                pass  # nothing was taken: the counts below tell
            seen.update({b.lineage_hash: b for b in request.blocks if isinstance(b, Identity)})
            if request.finished:
                running.remove(request)
        index.apply(kv.drain_events().consolidated)
        assert index.resident == {b.sequence_hash for b in seen.values() if kv.is_resident(b)}
        held = [r.blocks[: -(-r.allocated_tokens // 4)] for r in running]
        assert kv.active_references == sum(map(len, held))
        assert kv.active_blocks == len({block for blocks in held for block in blocks})
        kv.check()
    for request in running:
        send(kv, request.preempt())
    assert (kv.active_blocks, kv.active_references) == (0, 0)
    assert kv.metrics().evictions > 0


def advance(kv: KvManager, request: ActiveSequence) -> None:
    """One token more; when there is no block for it, it is taken back."""
    if request.max_output_tokens - request.generated_tokens == 1:
        grow_last(kv, request)
        return
    try:
        grow(kv, request)
    except CapacityExhausted:
        send(kv, request.pop())
        raise


def grow_last(kv: KvManager, request: ActiveSequence) -> None:
    """The last token needs no block in the end, but takes one on its way."""
    if len(request) % request.block_size == 0 and kv.active_blocks == kv.num_gpu_blocks:
        raise CapacityExhausted
    grow(kv, request)


class NativeMachine(RuleBasedStateMachine):
    @initialize()
    def build(self) -> None:
        tree = universe()
        self.prompts = [tree[:4], tree[:2] + tree[4:6], tree[:2] + tree[6:8], tree[8:10], tree[10:12]]
        self.tree = tree
        self.kv = KvManager(NUM_BLOCKS, BLOCK, backend="native", events=True)
        self.leases: list[tuple[BlockLease, Identities]] = []
        self.true = PlainIndex()
        self.copies: Counter[int] = Counter()

    def teardown(self) -> None:
        for lease, _ in getattr(self, "leases", []):
            lease.release()

    @rule(number=st.integers(0, 4), reuse=st.booleans())
    def start(self, number: int, reuse: bool) -> None:
        prompt = Identities.from_lineage_hashes([b.lineage_hash for b in self.prompts[number]])
        lease = self.kv.lease()
        hit = self.kv.overlap(prompt)[0] if reuse else 0
        before = self.kv.dump()
        try:
            lease.allocate(len(prompt) * BLOCK, prefix=prompt[:hit])
        except CapacityExhausted:
            assert self.kv.dump() == before
        else:
            assert lease.visible_blocks == hit
            self.leases.append((lease, prompt))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 20), tokens=st.integers(0, 8))
    def compute(self, pick: int, tokens: int) -> None:
        lease, prompt = self.leases[pick % len(self.leases)]
        tokens = min(tokens, lease.allocated_tokens)
        before = lease.visible_blocks
        assert lease.finalize(tokens, prompt) == max(0, tokens // BLOCK - before)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 20), discard=st.sampled_from([False, False, False, True]))
    def let_go(self, pick: int, discard: bool) -> None:
        lease, _ = self.leases.pop(pick % len(self.leases))
        if discard:
            lease.discard()
        else:
            lease.release()

    @invariant()
    def agrees(self) -> None:
        self.kv.check()
        events = self.kv.drain_events()
        self.true.apply(events.consolidated)
        for kind, _, hashes in told(events.raw):
            self.copies.update(dict.fromkeys(hashes, 0))
            for sequence_hash in hashes:
                self.copies[sequence_hash] += 1 if kind == "stored" else -1
        resident = {block.sequence_hash for block in self.tree if self.kv.is_resident(block)}
        assert resident == self.true.resident == {h for h, count in self.copies.items() if count}
        metrics = self.kv.metrics()
        assert self.copies.total() == metrics.active_blocks + metrics.inactive_blocks
        held = {block for lease, _ in self.leases for block in lease.block_ids.tolist()}
        assert self.kv.active_blocks == len(held)


def test_the_index_of_a_native_manager_is_right() -> None:
    run_state_machine_as_test(NativeMachine, settings=LIMITS)
