"""The block manager next to its model: every operation is done to both, and everything seen is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

import pytest

from model import block_manager as model
from model.eviction import AsPolicy, LastFreedFirst
from model.world import distinct, join
from understudy.errors import CapacityExhausted, InvalidArgument, UnderstudyError, WrongState
from understudy.kv import BlockManager, BlockStore, MutableBlocks, RegisteredBlocks, StagedBlocks, WeakBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.tokens import Identities, Identity

DuplicatesName = Literal["allow", "reject", "keep"]
NativeName = Literal["lineage", "lineage_fifo", "lru", "multi_lru", "fifo", "vllm", "vllm_append"]
DUPLICATES: tuple[DuplicatesName, ...] = get_args(DuplicatesName)
NATIVE_POLICIES: tuple[NativeName, ...] = get_args(NativeName)
PolicyName = NativeName | Literal["python"]
POLICIES: tuple[PolicyName, ...] = (*NATIVE_POLICIES, "python")


# ── Guards held at the moment ──


Guard = TypeVar("Guard", MutableBlocks, StagedBlocks, RegisteredBlocks)
T = TypeVar("T")


@dataclass
class Held(Generic[Guard]):
    """A guard and the blocks that the model holds for it."""

    guard: Guard
    blocks: list[int]
    identities: list[Identity] = field(default_factory=list)


@dataclass
class Remembered:
    weak: WeakBlocks
    blocks: list[int]
    identities: list[Identity]


class SideBySide:
    """Operations take small numbers, so that a Hypothesis machine and a seeded driver can both drive them.

    `which` counts round the guards of the kind that the operation needs; without one nothing happens.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: PolicyName,
        duplicates: DuplicatesName,
        chains: Sequence[Identities],
        *,
        reset_on_release: bool = False,
        event_capacity: int | None = None,
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            policy=AsPolicy(LastFreedFirst()) if policy == "python" else policy,
            duplicates=duplicates,
            reset_on_release=reset_on_release,
            events=True,
            event_capacity=event_capacity,
            sketch_capacity=2**16,  # roomy: with few hashes its estimates are exact
        )
        self.store: BlockStore = self.manager.store
        self.model = model.BlockManager(num_blocks, policy, duplicates, reset_on_release=reset_on_release)
        self.policy = policy
        self.chains = chains
        self.all = distinct(chains)
        self.mutable: list[Held[MutableBlocks]] = []
        self.staged: list[Held[StagedBlocks]] = []
        self.registered: list[Held[RegisteredBlocks]] = []
        self.weak: list[Remembered] = []
        self.resident: set[int] = set()  # what the drained events say
        self.generation: dict[int, int] = {}
        self.last_event_id = -1
        self.drained = 0

    # ── Picking blocks ──

    def prefix(self, which: int, length: int) -> Identities:
        whole = self.chains[which % len(self.chains)]
        return whole[: length % (len(whole) + 1)]

    def scattered(self, picks: Sequence[int]) -> Identities:
        at = [pick % len(self.all) for pick in picks]
        return join([self.all[i : i + 1] for i in at])

    # ── Operations ──

    def allocate(self, count: int) -> None:
        if count > self.model.available():
            self.refuses(CapacityExhausted, lambda: self.manager.allocate(count))
            return
        guard = self.manager.allocate(count)
        blocks, evicted = self.model.allocate(count)
        self.mutable.append(Held(guard, blocks))
        assert guard.ids.tolist() == blocks
        assert list(guard.evicted) == evicted

    def stage(self, which: int, identities: Identities) -> None:
        if held := self.pop(self.mutable, which):
            fitting = self.fit(identities, len(held.blocks))
            guard = held.guard.stage(fitting)
            self.model.stage(held.blocks, list(fitting))
            self.staged.append(Held(guard, held.blocks, list(fitting)))
            assert held.guard.released
            assert guard.ids.tolist() == held.blocks

    def unstage(self, which: int) -> None:
        if held := self.pop(self.staged, which):
            guard = held.guard.reset()
            self.model.unstage(held.blocks)
            self.mutable.append(Held(guard, held.blocks))
            assert guard.ids.tolist() == held.blocks

    def register_staged(self, which: int) -> None:
        if held := self.pop(self.staged, which):
            guard = held.guard.register()
            self.now_registered(guard, self.model.register(held.blocks), held.identities)

    def register_direct(self, which: int, identities: Identities) -> None:
        if held := self.pop(self.mutable, which):
            fitting = self.fit(identities, len(held.blocks))
            guard = held.guard.register(fitting)
            self.model.stage(held.blocks, list(fitting))
            self.now_registered(guard, self.model.register(held.blocks), list(fitting))

    def match_prefix(self, identities: Identities) -> None:
        blocks = self.model.match_prefix(list(identities))
        self.now_registered(self.manager.match_prefix(identities), blocks, list(identities)[: len(blocks)])

    def match_scattered(self, identities: Identities) -> None:
        guard, mask = self.manager.match_scattered(identities)
        found = self.model.match_scattered(list(identities))
        assert mask.tolist() == [block is not None for block in found]
        hits = [
            (block, identity) for block, identity in zip(found, identities, strict=True) if block is not None
        ]
        self.now_registered(guard, [block for block, _ in hits], [identity for _, identity in hits])

    def scan(self, identities: Identities, *, touch: bool) -> None:
        blocks = self.model.scan(list(identities), touch=touch)
        guard = self.manager.scan(identities, touch=touch)
        self.now_registered(guard, blocks, [self.model.identity(block) for block in blocks])

    def look(self, identities: Identities) -> None:
        here = [self.model.has(identity) for identity in identities]
        assert self.manager.has_blocks(identities).tolist() == here
        assert self.manager.prefix_length(identities) == self.model.prefix_length(list(identities))

    def touch(self, identities: Identities) -> None:
        self.manager.touch(identities)
        self.model.touch(list(identities))

    def clone(self, which: int) -> None:
        if held := self.look_at(self.registered, which):
            guard = held.guard.clone()
            self.model.retain(held.blocks)
            self.now_registered(guard, list(held.blocks), list(held.identities))

    def take(self, which: int, count: int) -> None:
        if held := self.look_at(self.registered, which):
            count %= len(held.blocks) + 1
            guard = held.guard.take(count)
            self.now_registered(guard, held.blocks[:count], held.identities[:count])
            held.blocks, held.identities = held.blocks[count:], held.identities[count:]
            assert held.guard.ids.tolist() == held.blocks
            assert list(held.guard.identities) == held.identities

    def take_mutable(self, which: int, count: int) -> None:
        if held := self.look_at(self.mutable, which):
            count %= len(held.blocks) + 1
            self.mutable.append(Held(held.guard.take(count), held.blocks[:count]))
            held.blocks = held.blocks[count:]
            assert self.mutable[-1].guard.ids.tolist() == self.mutable[-1].blocks
            assert held.guard.ids.tolist() == held.blocks

    def remember(self, which: int) -> None:
        if held := self.look_at(self.registered, which):
            self.weak.append(Remembered(held.guard.weak(), list(held.blocks), list(held.identities)))

    def upgrade(self, which: int) -> None:
        if self.weak:
            ref = self.weak[which % len(self.weak)]
            guard = ref.weak.upgrade()
            blocks = self.model.upgrade(ref.blocks, ref.identities)
            assert (guard is None) == (blocks is None)
            if guard is not None and blocks is not None:
                self.now_registered(guard, blocks, ref.identities)

    def set_reset_on_release(self, which: int, value: bool) -> None:
        if held := self.look_at(self.registered, which):
            held.guard.set_reset_on_release(value)
            self.model.set_reset_on_release(held.blocks, value)

    def release_mutable(self, which: int) -> None:
        if held := self.pop(self.mutable, which):
            held.guard.release()
            self.model.release(held.blocks[::-1])

    def release_staged(self, which: int) -> None:
        if held := self.pop(self.staged, which):
            held.guard.release()
            self.model.release(held.blocks[::-1])

    def release(self, which: int, *, tail_first: bool) -> None:
        if held := self.pop(self.registered, which):
            held.guard.release(tail_first=tail_first)
            self.model.release(held.blocks[::-1] if tail_first else held.blocks)
            held.guard.release()  # idempotent
            assert held.guard.released

    def clear_inactive(self) -> None:
        assert self.manager.clear_inactive() == self.model.clear_inactive()

    def drain_events(self, limit: int | None = None) -> None:
        """Applies what comes to an index, and checks that no event contradicts it."""
        batch = self.store.drain_events(limit)
        rows = zip(
            batch.ids.tolist(),
            batch.kinds.tolist(),
            batch.sole.tolist(),
            batch.generations.tolist(),
            batch.sequence_hashes.tolist(),
            batch.positions.tolist(),
            batch.local_hashes.tolist(),
            batch.parent_hashes.tolist(),
            strict=True,
        )
        expected = self.model.events[self.drained : self.drained + len(batch)]
        assert len(expected) == len(batch)
        assert batch.lost == 0
        for (event_id, kind, sole, generation, *block), event in zip(rows, expected, strict=True):
            lineage = event.lineage
            assert (kind, bool(sole)) == (0 if event.kind == "stored" else 1, event.sole)
            about = next(identity for identity in self.all if identity.lineage_hash == lineage)
            assert block == [about.sequence_hash, about.position, about.local_hash, about.parent_hash or 0]
            assert event_id > self.last_event_id
            self.last_event_id = event_id
            if sole and kind == 0:
                assert lineage not in self.resident
                assert generation > self.generation.get(lineage, 0)
                self.resident.add(lineage)
                self.generation[lineage] = generation
            else:
                assert lineage in self.resident
                assert generation == self.generation[lineage]
                if sole:
                    self.resident.remove(lineage)
        self.drained += len(batch)

    def misuse(self, which: int, kind: int) -> None:
        """Calls that must be refused: nothing changes, and live guards stay usable."""
        too_many = self.all[: self.manager.num_blocks + 1]
        calls: list[tuple[type[UnderstudyError], Callable[[], object]]] = [
            (InvalidArgument, lambda: self.manager.allocate(-1)),
            (CapacityExhausted, lambda: self.manager.allocate(self.manager.num_blocks + 1)),
        ]
        if self.mutable:
            held = self.mutable[which % len(self.mutable)].guard
            calls += [
                (InvalidArgument, lambda: held.stage(too_many)),
                (InvalidArgument, lambda: held.register(too_many)),
                (InvalidArgument, lambda: held.take(len(held) + 1)),
                (InvalidArgument, lambda: held.register(self.fit(self.all, len(held)), token_ids=[1])),
            ]
        if self.staged:
            staged = self.staged[which % len(self.staged)].guard
            calls.append((InvalidArgument, lambda: staged.register(token_ids=[1])))
        if self.registered:
            registered = self.registered[which % len(self.registered)].guard
            calls.append((InvalidArgument, lambda: registered.take(len(registered) + 1)))
            spent = registered.clone()
            spent.release()
            calls += [
                (WrongState, spent.clone),
                (WrongState, spent.weak),
                (WrongState, lambda: spent.take(0)),
            ]
        error, call = calls[kind % len(calls)]
        self.refuses(error, call)

    # ── Comparing ──

    def refuses(self, error: type[UnderstudyError], call: Callable[[], object]) -> None:
        before = self.store.dump()
        with pytest.raises(error):
            call()
        assert self.store.dump() == before

    def compare(self) -> None:
        self.store.check()
        self.model.check()
        assert self.manager.available == self.model.available()
        assert self.manager.metrics().as_dict() == self.model.metrics()
        if self.policy != "python":
            assert self.manager.eviction_order().tolist() == self.model.order.order()
        assert self.manager.has_blocks(self.all).tolist() == [
            self.model.has(identity) for identity in self.all
        ]

    def compare_uses(self) -> None:
        for identity in self.all:
            assert self.manager.frequency(identity.lineage_hash) == self.model.uses(identity.lineage_hash)

    def compare_events(self) -> None:
        self.drain_events()
        assert self.drained == len(self.model.events)
        assert self.resident == set(self.model.copies)

    def close(self) -> None:
        """Releases everything and checks that nothing is missing."""
        for mutable in self.mutable:
            mutable.guard.release()
        for staged in self.staged:
            staged.guard.release()
        for registered in self.registered:
            registered.guard.release()
        metrics = self.manager.metrics()
        assert self.manager.available == metrics.total_blocks
        assert (metrics.mutable_blocks, metrics.staged_blocks, metrics.active_references) == (0, 0, 0)
        assert metrics.allocations == metrics.allocations_from_reset + metrics.evictions
        assert metrics.stagings >= metrics.registrations
        assert metrics.leaked_guards == 0
        self.store.check()

    # ── Parts ──

    def now_registered(self, guard: RegisteredBlocks, blocks: list[int], identities: list[Identity]) -> None:
        self.registered.append(Held(guard, blocks, identities))
        assert guard.ids.tolist() == blocks
        assert list(guard.identities) == identities

    def fit(self, identities: Identities, count: int) -> Identities:
        """Exactly `count` identities, repeating the given ones where they do not suffice."""
        some = identities if len(identities) > 0 else self.all[:1]
        return join([some] * (count // len(some) + 1))[:count]

    @staticmethod
    def look_at(held: list[T], which: int) -> T | None:
        return held[which % len(held)] if held else None

    @staticmethod
    def pop(held: list[T], which: int) -> T | None:
        return held.pop(which % len(held)) if held else None
