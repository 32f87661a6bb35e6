"""A slow, obvious block manager: one list of slots, one dict of copies, an eviction order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from model.eviction import Order, order_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.tokens import Identity

State = Literal["reset", "mutable", "staged", "primary", "duplicate", "inactive"]
COUNTERS = (
    "allocations",
    "allocations_from_reset",
    "evictions",
    "stagings",
    "registrations",
    "duplicate_blocks",
    "registration_dedup",
    "match_hashes_requested",
    "match_blocks_returned",
    "scan_hashes_requested",
    "scan_blocks_returned",
    "leaked_guards",
)


@dataclass
class Slot:
    state: State = "reset"
    identity: Identity | None = None
    refs: int = 0
    reset_on_release: bool = False


@dataclass(frozen=True)
class Event:
    kind: Literal["stored", "removed"]
    lineage: int
    sole: bool


@dataclass
class Uses:
    """How often each hash was used, shared by the tiers of a store. Saturates at 15."""

    counts: Counter[int] = field(default_factory=Counter)

    def __call__(self, lineage: int) -> int:
        return min(self.counts[lineage], 15)


class BlockManager:
    """What `understudy.kv.BlockManager` must do. Callers pass only what is legal."""

    def __init__(
        self,
        num_blocks: int,
        policy: str,
        duplicates: str,
        *,
        reset_on_release: bool = False,
        uses: Uses | None = None,
    ) -> None:
        self.duplicates = duplicates
        self.default_reset = reset_on_release
        self.uses = uses or Uses()
        self.slots = [Slot() for _ in range(num_blocks)]
        self.order: Order = order_named(policy, self.uses)
        self.order.insert([(block, None) for block in range(num_blocks)])
        self.copies: dict[int, list[int]] = {}  # lineage hash to the blocks that hold it, earliest first
        self.elsewhere: list[BlockManager] = []  # the other tiers of the store
        self.events: list[Event] = []
        self.counters = dict.fromkeys(COUNTERS, 0)

    # ── Allocate ──

    def available(self) -> int:
        return sum(slot.state in ("reset", "inactive") for slot in self.slots)

    def allocate(self, count: int) -> tuple[list[int], list[Identity]]:
        """The blocks and what was evicted. `count` must be available."""
        blocks = self.order.order()[:count]
        evicted = []
        for block in blocks:
            self.order.remove(block)
            if self.slots[block].state == "inactive":
                evicted.append(self.identity(block))
                self.forget(block)
            self.slots[block] = Slot("mutable", refs=1, reset_on_release=self.default_reset)
        self.counters["allocations"] += count
        self.counters["evictions"] += len(evicted)
        self.counters["allocations_from_reset"] += count - len(evicted)
        return blocks, evicted

    # ── Fill ──

    def stage(self, blocks: Sequence[int], identities: Sequence[Identity]) -> None:
        for block, identity in zip(blocks, identities, strict=True):
            slot = self.slots[block]
            assert slot.state == "mutable"
            slot.state, slot.identity = "staged", identity
        self.counters["stagings"] += len(blocks)

    def unstage(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.slots[block].state == "staged"
            self.slots[block] = Slot("mutable", refs=1, reset_on_release=self.default_reset)

    def register(self, blocks: Sequence[int]) -> list[int]:
        """The blocks that now hold the identities."""
        freed: list[int] = []
        held = [self.register_one(block, freed) for block in blocks]
        self.counters["registrations"] += len(blocks)
        self.enter_order(freed)
        return held

    def register_one(self, block: int, freed: list[int]) -> int:
        slot, lineage = self.slots[block], self.identity(block).lineage_hash
        copies = self.copies.get(lineage, [])
        if copies and self.duplicates == "reject":
            self.slots[block] = Slot()
            freed.append(block)
            self.counters["registration_dedup"] += 1
            self.reference(copies[0])
            return copies[0]
        slot.state = "primary"
        if not copies:
            self.copies[lineage] = [block]
            if not any(lineage in tier.copies for tier in self.elsewhere):
                self.uses.counts[lineage] += 1
            self.events.append(Event("stored", lineage, sole=True))
        elif self.duplicates == "keep":
            copies.append(block)
            self.events.append(Event("stored", lineage, sole=False))
        elif (
            self.slots[copies[0]].state == "inactive"
        ):  # the twin gives way, so that no second slot is pinned
            self.order.remove(copies[0])
            self.slots[copies[0]] = Slot()
            freed.append(copies[0])
            copies[:] = [block]
        else:
            slot.state = "duplicate"
            copies.append(block)
            self.slots[copies[0]].refs += 1
            self.counters["duplicate_blocks"] += 1
        return block

    # ── Find ──

    def match_prefix(self, identities: Sequence[Identity]) -> list[int]:
        hits = identities[: self.prefix_length(identities)]
        self.counters["match_hashes_requested"] += len(identities)
        self.counters["match_blocks_returned"] += len(hits)
        return [self.use(identity) for identity in hits]

    def match_scattered(self, identities: Sequence[Identity]) -> list[int | None]:
        found = [self.use(identity) if self.has(identity) else None for identity in identities]
        self.counters["match_hashes_requested"] += len(identities)
        self.counters["match_blocks_returned"] += sum(block is not None for block in found)
        return found

    def scan(self, identities: Sequence[Identity], *, touch: bool) -> list[int]:
        """One reference to each distinct hit, in order of its first occurrence."""
        found: list[int] = []
        for identity in filter(self.has, identities):
            if touch:
                self.uses.counts[identity.lineage_hash] += 1
            if self.earliest(identity) not in found:
                found.append(self.reference(self.earliest(identity)))
        self.counters["scan_hashes_requested"] += len(identities)
        self.counters["scan_blocks_returned"] += len(found)
        return found

    def prefix_length(self, identities: Sequence[Identity]) -> int:
        misses = [i for i, identity in enumerate(identities) if not self.has(identity)]
        return misses[0] if misses else len(identities)

    def has(self, identity: Identity) -> bool:
        return identity.lineage_hash in self.copies

    def touch(self, identities: Sequence[Identity]) -> None:
        here = [identity for identity in identities if self.has(identity)]
        self.uses.counts.update(identity.lineage_hash for identity in here)
        blocks = [self.earliest(identity) for identity in here]
        self.order.touch([block for block in blocks if self.slots[block].state == "inactive"])

    def upgrade(self, blocks: Sequence[int], identities: Sequence[Identity]) -> list[int] | None:
        """References all, each in its old place if it still is there, or nothing."""
        if not all(map(self.has, identities)):
            return None
        return [
            self.reference(block if block in self.copies[identity.lineage_hash] else self.earliest(identity))
            for block, identity in zip(blocks, identities, strict=True)
        ]

    # ── Hold and let go ──

    def retain(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.slots[block].state in ("primary", "duplicate")
            self.slots[block].refs += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference each. A keep-alive that ends frees its primary behind the others."""
        dropped = []
        for block in blocks:
            self.slots[block].refs -= 1
            assert self.slots[block].refs >= 0
            if self.slots[block].refs == 0:
                dropped.append(block)
        freed = list(dropped)
        for block in dropped:
            self.let_go(block, freed)
        self.enter_order(freed)

    def let_go(self, block: int, freed: list[int]) -> None:
        slot = self.slots[block]
        if slot.state == "primary" and not slot.reset_on_release:
            slot.state = "inactive"
            return
        if slot.state == "duplicate":
            primary = self.copies[self.identity(block).lineage_hash][0]
            self.forget(block)
            self.slots[primary].refs -= 1
            if self.slots[primary].refs == 0:
                freed.append(primary)
                self.let_go(primary, freed)
        elif slot.state == "primary":
            self.forget(block)
        self.slots[block] = Slot()

    def set_reset_on_release(self, blocks: Sequence[int], value: bool) -> None:
        for block in blocks:
            self.slots[block].reset_on_release = value

    def clear_inactive(self) -> int:
        cached = [block for block, slot in enumerate(self.slots) if slot.state == "inactive"]
        for block in cached:
            self.order.remove(block)
            self.forget(block)
            self.slots[block] = Slot()
        self.enter_order(cached)
        return len(cached)

    # ── Parts ──

    def identity(self, block: int) -> Identity:
        identity = self.slots[block].identity
        assert identity is not None
        return identity

    def earliest(self, identity: Identity) -> int:
        return self.copies[identity.lineage_hash][0]

    def use(self, identity: Identity) -> int:
        self.uses.counts[identity.lineage_hash] += 1
        return self.reference(self.earliest(identity))

    def reference(self, block: int) -> int:
        slot = self.slots[block]
        if slot.state == "inactive":
            self.order.remove(block)
            slot.state = "primary"
        slot.refs += 1
        return block

    def forget(self, block: int) -> None:
        lineage = self.identity(block).lineage_hash
        self.copies[lineage].remove(block)
        last = not self.copies[lineage]
        if last:
            del self.copies[lineage]
        if last or self.duplicates == "keep":
            self.events.append(Event("removed", lineage, sole=last))

    def enter_order(self, freed: Sequence[int]) -> None:
        self.order.insert(
            [
                (block, self.identity(block).lineage_hash if self.slots[block].state == "inactive" else None)
                for block in freed
            ]
        )

    # ── Watch ──

    def metrics(self) -> dict[str, int]:
        states = Counter(slot.state for slot in self.slots)
        registered = [slot for slot in self.slots if slot.state in ("primary", "duplicate")]
        return self.counters | {
            "total_blocks": len(self.slots),
            "reset_blocks": states["reset"],
            "mutable_blocks": states["mutable"],
            "staged_blocks": states["staged"],
            "active_blocks": len(registered),
            "inactive_blocks": states["inactive"],
            "active_references": sum(slot.refs for slot in registered),
        }

    def check(self) -> None:
        """The invariants of a pool between two calls."""
        order = self.order.order()
        unreferenced = [block for block, slot in enumerate(self.slots) if slot.state in ("reset", "inactive")]
        assert sorted(order) == unreferenced
        assert len(order) == self.available()
        for block, slot in enumerate(self.slots):
            assert (slot.refs == 0) == (block in unreferenced)
            registered = slot.state in ("primary", "duplicate", "inactive")
            if registered:
                assert block in self.copies[self.identity(block).lineage_hash]
        assert sum(map(len, self.copies.values())) == sum(
            slot.state in ("primary", "duplicate", "inactive") for slot in self.slots
        )
        for copies in self.copies.values():
            states = [self.slots[block].state for block in copies]
            if self.duplicates == "keep":
                assert set(states) <= {"primary", "inactive"}
            else:
                assert states[0] in ("primary", "inactive")
                assert set(states[1:]) <= {"duplicate"}
                assert len(states) == 1 or (self.duplicates == "allow" and states[0] == "primary")
                assert self.slots[copies[0]].refs >= len(states) - 1  # a keep-alive for each duplicate
