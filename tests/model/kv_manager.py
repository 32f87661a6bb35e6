"""A slow, obvious KV manager with one physical block a hash, and an index that knows only what events tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from model.eviction import order_named
from understudy.events import EventsLost, KvEvent, Stored
from understudy.tokens import Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

Block: TypeAlias = Identity | int
Told: TypeAlias = tuple[str, int | None, list[int]]  # stored or removed, parent, sequence hashes


class NoRoom(Exception):
    """Fewer blocks are available than the call needs."""


class NotHeld(Exception):
    """A block that the caller cannot hold."""


def told(events: Sequence[KvEvent]) -> list[Told]:
    """Events without what the model does not know: ids, positions, generations."""
    out: list[Told] = []
    for event in events:
        assert not isinstance(event, EventsLost)
        parent = event.parent_hash if isinstance(event, Stored) else None
        kind = "stored" if isinstance(event, Stored) else "removed"
        out.append((kind, parent, [block.sequence_hash for block in event.blocks]))
    return out


class PlainIndex:
    """Which hashes a worker holds, from its events alone. Every contradiction is an error."""

    def __init__(self, *, parents: bool = False) -> None:
        self.parents = parents  # a block may only be stored behind one that is here
        self.resident: set[int] = set()
        self.next_id = 0

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            assert not isinstance(event, EventsLost)
            assert event.event_id == self.next_id, "ids count by one"
            self.next_id += 1
            assert event.blocks, "an event without blocks"
            if isinstance(event, Stored):
                parent = event.parent_hash
                for block in event.blocks:
                    if self.parents and parent is not None:
                        assert parent in self.resident, "stored behind a block that is not here"
                    assert block.sequence_hash not in self.resident, "stored twice"
                    self.resident.add(block.sequence_hash)
                    parent = block.sequence_hash
            else:
                for removed in event.blocks:
                    self.resident.remove(removed.sequence_hash)


@dataclass
class Entry:
    """A registered block: where it is and who holds it. Without references it is inactive."""

    slot: int
    identity: Identity
    references: int


class KvManager:
    """What `understudy.kv.kv_manager.KvManager` with backend kvbm must do."""

    def __init__(self, num_blocks: int, eviction: str) -> None:
        self.num_blocks = num_blocks
        self.uses: Counter[int] = Counter()
        self.order = order_named(eviction, lambda lineage: self.uses[lineage])
        self.order.insert([(slot, None) for slot in range(num_blocks)])
        self.entries: dict[int, Entry] = {}  # by lineage hash
        self.partials: dict[int, int] = {}
        self.orphans: list[Entry] = []  # discarded while others held them
        self.raw: list[Told] = []
        self.consolidated: list[Told] = []

    def available(self) -> int:
        return len(self.order)

    def inactive(self) -> int:
        return sum(entry.references == 0 for entry in self.entries.values())

    def active_references(self) -> int:
        held = [*self.entries.values(), *self.orphans]
        return len(self.partials) + sum(entry.references for entry in held)

    def is_new(self, block: Block) -> bool:
        return (
            block not in self.partials if isinstance(block, int) else block.lineage_hash not in self.entries
        )

    def fit(self, blocks: Sequence[Block]) -> int:
        """The longest prefix that can be acquired."""
        for count in range(len(blocks), 0, -1):
            taken: set[Block] = set()
            for block in blocks[:count]:
                entry = None if isinstance(block, int) else self.entries.get(block.lineage_hash)
                if self.is_new(block) or (entry is not None and entry.references == 0):
                    taken.add(block)
            if len(taken) <= self.available():
                return count
        return 0

    def acquire(self, blocks: Sequence[Block]) -> None:
        if self.fit(blocks) < len(blocks):
            raise NoRoom
        for block in blocks:  # hits are safe before anything is evicted
            if isinstance(block, Identity) and block.lineage_hash in self.entries:
                self.reference(block)
        removed: list[int] = []
        runs: list[tuple[int | None, list[Identity]]] = []
        before: Identity | None = None
        running = False
        hits = {block for block in blocks if not self.is_new(block)}
        for block in blocks:
            if isinstance(block, int):
                if block not in self.partials:
                    self.partials[block] = self.allocate(removed)
                continue
            if block in hits:
                running = False
            elif block.lineage_hash in self.entries:  # named before in this call
                self.reference(block)
                running = False
            else:
                self.entries[block.lineage_hash] = Entry(self.allocate(removed), block, 1)
                self.uses[block.lineage_hash] += 1
                if not running:
                    runs.append((block.parent_hash if before is None else before.sequence_hash, []))
                runs[-1][1].append(block)
                running = True
            before = block
        self.tell_stored(runs)
        self.tell_removed(removed)

    def allocate(self, removed: list[int]) -> int:
        (slot,) = self.order.head(1)
        self.order.remove(slot)
        for lineage, entry in list(self.entries.items()):
            if entry.slot == slot and entry.references == 0:
                removed.append(entry.identity.sequence_hash)
                del self.entries[lineage]
        return slot

    def reference(self, block: Identity) -> None:
        entry = self.entries[block.lineage_hash]
        if entry.references == 0:
            self.order.remove(entry.slot)
            self.uses[block.lineage_hash] += 1
        entry.references += 1

    def holdings(self, block: Block) -> int:
        if isinstance(block, int):
            return int(block in self.partials)
        entry = self.entries.get(block.lineage_hash)
        orphans = sum(o.references for o in self.orphans if o.identity.lineage_hash == block.lineage_hash)
        return orphans + (entry.references if entry else 0)

    def release(self, blocks: Sequence[Block]) -> None:
        if any(count > self.holdings(block) for block, count in Counter(blocks).items()):
            raise NotHeld
        for block in blocks:
            self.release_one(block)

    def release_one(self, block: Block) -> None:
        if isinstance(block, int):
            self.order.insert([(self.partials.pop(block), None)])
            return
        for orphan in self.orphans:
            if orphan.identity.lineage_hash == block.lineage_hash:
                orphan.references -= 1
                if orphan.references == 0:
                    self.orphans.remove(orphan)
                    self.order.insert([(orphan.slot, None)])
                return
        entry = self.entries[block.lineage_hash]
        entry.references -= 1
        if entry.references == 0:
            self.order.insert([(entry.slot, block.lineage_hash)])

    def seal(self, partial: int, block: Identity) -> None:
        if partial not in self.partials:
            raise NotHeld
        if block.lineage_hash in self.entries:
            self.reference(block)
            self.release_one(partial)
            return
        self.entries[block.lineage_hash] = Entry(self.partials.pop(partial), block, 1)
        self.uses[block.lineage_hash] += 1
        self.tell_stored([(block.parent_hash, [block])])

    def discard(self, blocks: Sequence[Block]) -> None:
        """Distinct blocks, each held."""
        removed: list[int] = []
        for block in blocks:
            orphaned = isinstance(block, Identity) and any(
                orphan.identity.lineage_hash == block.lineage_hash for orphan in self.orphans
            )
            if isinstance(block, Identity) and not orphaned:
                removed.append(block.sequence_hash)
                self.orphans.append(self.entries.pop(block.lineage_hash))
            self.release_one(block)
        self.tell_removed(removed)

    def tell_stored(self, runs: list[tuple[int | None, list[Identity]]]) -> None:
        last: Identity | None = None
        for parent, blocks in runs:
            self.raw.append(("stored", parent, [block.sequence_hash for block in blocks]))
            for block in blocks:
                child = last is not None and block.parent_hash == last.sequence_hash
                if last is None or not child or block.position != last.position + 1:
                    self.consolidated.append(("stored", block.parent_hash, []))
                self.consolidated[-1][2].append(block.sequence_hash)
                last = block

    def tell_removed(self, hashes: list[int]) -> None:
        if hashes:
            self.raw.append(("removed", None, list(hashes)))
            self.consolidated.append(("removed", None, list(hashes)))
