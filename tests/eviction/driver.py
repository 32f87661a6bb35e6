"""Drives one pool by the names of its blocks, so that a test reads like the trace it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.kv import BlockManager, MutableBlocks, RegisteredBlocks
from understudy.tokens import Identities

if TYPE_CHECKING:
    from types import TracebackType

    from understudy.core_types import DuplicatePolicyName, Policy, PolicyName

EMPTY = "."


class Cache:
    """A pool whose blocks have names. `known` maps a name to its identity (a run of one)."""

    def __init__(
        self,
        policy: PolicyName | Policy,
        num_blocks: int,
        *,
        duplicates: DuplicatePolicyName = "allow",
        thresholds: list[int] | None = None,
        sketch_capacity: int | None = None,
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            policy=policy,
            duplicates=duplicates,
            thresholds=thresholds,
            sketch_capacity=sketch_capacity,
        )
        self.known: dict[str, Identities] = {}
        self._names: dict[int, str] = {}
        self._held: dict[str, list[RegisteredBlocks]] = {}
        self._taken: list[MutableBlocks] = []

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for guards in self._held.values():
            for guard in guards:
                guard.release()
        for taken in self._taken:
            taken.release()

    # --- naming ---

    def know(self, name: str, identity: Identities) -> None:
        self.known[name] = identity
        self._names[identity.lineage_hashes[0]] = name

    def chain(self, names: str, after: str | None = None) -> None:
        """Names the blocks of a chain, which continues block `after` or starts at position 0."""
        parent = self.known[after] if after else None
        for name in names.split():
            # Any non-zero hash will do; one per name, so that chains differ.
            identity = Identities.from_local_hashes([1_000_003 * (len(self.known) + 1)], parent=parent)
            self.know(name, identity)
            parent = identity

    def names(self, identities: Identities) -> str:
        return " ".join(self._names[plh] for plh in identities.lineage_hashes)

    # --- blocks in and out of use ---

    def store(self, names: str) -> None:
        """Allocates and registers the blocks in one go, and holds them."""
        blocks = [self.known[name] for name in names.split()]
        run = sum(blocks, Identities())
        mutable = self.manager.allocate(len(blocks))
        registered = mutable.register(run)
        for name in names.split():
            self._held.setdefault(name, []).append(registered.take(1))
        registered.release()

    def release(self, names: str) -> None:
        """Drops one reference to each, in this order."""
        for name in names.split():
            self._held[name].pop().release()

    def insert(self, names: str) -> None:
        """Makes the blocks inactive in this order."""
        self.store(names)
        self.release(names)

    def match(self, names: str) -> int:
        """References the leading hits among the blocks; returns their number."""
        run = sum((self.known[name] for name in names.split()), Identities())
        found = self.manager.match_prefix(run)
        hits = len(found)
        for name in names.split()[:hits]:
            self._held.setdefault(name, []).append(found.take(1))
        found.release()
        return hits

    def reuse(self, names: str) -> None:
        """Matches the blocks, one by one, and releases each again."""
        for name in names.split():
            assert self.match(name) == 1
            self.release(name)

    def take(self, count: int) -> str:
        """Allocates `count` blocks for good; returns the names of what that evicted, in order."""
        mutable = self.manager.allocate(count)
        self._taken.append(mutable)
        return self.names(mutable.evicted)

    def fill(self) -> None:
        """Takes all empty blocks for good, so that the next allocation has to evict."""
        self._taken.append(self.manager.allocate(self.manager.metrics().reset_blocks))

    # --- watching ---

    def has(self, name: str) -> bool:
        return bool(self.manager.has_blocks(self.known[name])[0])

    def inactive(self) -> int:
        return self.manager.metrics().inactive_blocks

    def next_out(self) -> str:
        """The cached blocks in the order in which they would be evicted, without evicting any."""
        return " ".join(name for name in self.order().split() if name != EMPTY)

    def order(self) -> str:
        """All unreferenced blocks in the order in which they would go; '.' stands for an empty one."""
        slots: dict[int, str] = {}
        for line in self.manager.store.dump().splitlines():
            words = line.split()
            if words[0].isdigit() and words[1] == "inactive":
                high, low = words[words.index("lineage") + 1].split(":")
                slots[int(words[0])] = self._names[(int(high, 16) << 64) | int(low, 16)]
        return " ".join(slots.get(int(slot), EMPTY) for slot in self.manager.eviction_order())
