"""A slow, obvious model of the host tier of vLLM's native offloading: chunks, slots, and who is evicted.

Chunks are named by anything hashable. Two ways: revision a014e35f (`recorded`, 0.28 to 0.30) and 0.32 (and 0.31).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence


@dataclass(eq=False)
class Chunk:
    """Where a chunk lies, and what is being done to it."""

    slot: int
    refs: int = -1  # -1: being written; 0: idle; more: being loaded

    @property
    def ready(self) -> bool:
        return self.refs >= 0


@dataclass(eq=False)
class Access:
    """What one request did to chunks (0.32), by position."""

    seen: dict[Hashable, int] = field(default_factory=dict)
    inserted: set[Hashable] = field(default_factory=set)
    reused: set[Hashable] = field(default_factory=set)
    missed: set[Hashable] = field(default_factory=set)

    def reuse(self, keys: Iterable[Hashable]) -> None:
        self.reused.update(key for key in keys if key not in self.inserted)

    def in_order(self) -> list[Hashable]:
        return sorted(self.seen, key=lambda key: self.seen[key])


class Lru:
    """a014e35f: a list of the idle chunks, oldest first; a chunk joins it when its transfer is done."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: dict[Any, Chunk] = {}
        self.idle: dict[Any, None] = {}

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self.idle:
                del self.idle[key]
                self.idle[key] = None

    def insert(self, key: Hashable, chunk: Chunk) -> None:
        self.chunks[key] = chunk

    def became_idle(self, key: Hashable) -> None:
        self.idle[key] = None

    def became_busy(self, key: Hashable) -> None:
        del self.idle[key]

    def oldest(self) -> list[Any]:
        return list(self.idle)

    def evict(self, count: int, protected: Collection[Hashable]) -> list[Any] | None:
        victims = [key for key in self.oldest() if key not in protected][:count]
        if len(victims) < count:
            return None
        for key in victims:
            self.remove(key)
        return victims

    def remove(self, key: Hashable) -> None:
        del self.chunks[key]
        self.idle.pop(key, None)

    def missed(self, keys: Sequence[Hashable]) -> None:
        """Chunks that a store found absent."""

    def ended(self, access: Access) -> None:
        """A request has ended."""


class RankedLru(Lru):
    """0.32: every chunk has a rank, given at its insertion and renewed when a request that used it has ended."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.ranks: dict[Any, int] = {}
        self.next_rank = 0

    def touch(self, keys: Sequence[Hashable]) -> None:
        raise AssertionError(f"0.32 does not touch, and {len(keys)} chunks were")

    def insert(self, key: Hashable, chunk: Chunk) -> None:
        super().insert(key, chunk)
        self._renew(key)

    def ended(self, access: Access) -> None:
        for key in reversed(access.in_order()):
            if key in self.chunks:
                self._renew(key)

    def oldest(self) -> list[Any]:
        return sorted(self.idle, key=lambda key: self.ranks[key])

    def remove(self, key: Hashable) -> None:
        super().remove(key)
        del self.ranks[key]

    def _renew(self, key: Hashable) -> None:
        self.next_rank += 1
        self.ranks[key] = self.next_rank


class Arc:
    """Adaptive replacement: once seen (t1), seen again (t2), and the ghosts of both."""

    falls_back = False  # since 0.30: when t2 has nobody to give, t1 gives although it is below its target

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.t1: dict[Any, Chunk] = {}
        self.t2: dict[Any, Chunk] = {}
        self.b1: dict[Any, None] = {}
        self.b2: dict[Any, None] = {}

    @property
    def chunks(self) -> dict[Any, Chunk]:
        return {**self.t1, **self.t2}

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self.t1:
                chunk = self.t1.pop(key)
                (self.t2 if chunk.ready else self.t1)[key] = chunk
            elif key in self.t2:
                self.t2[key] = self.t2.pop(key)
            else:
                self._learn(key)

    def _learn(self, key: Hashable) -> None:
        if key in self.b1:
            self.target = min(self.target + max(1, len(self.b2) / len(self.b1)), self.capacity)
            self.b1[key] = self.b1.pop(key)
        elif key in self.b2:
            self.target = max(self.target - max(1, len(self.b1) / len(self.b2)), 0)
            self.b2[key] = self.b2.pop(key)

    def insert(self, key: Hashable, chunk: Chunk) -> None:
        self.t1[key] = chunk
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def became_idle(self, key: Hashable) -> None:
        pass

    def became_busy(self, key: Hashable) -> None:
        pass

    def oldest(self) -> list[Any] | None:
        return None

    def evict(self, count: int, protected: Collection[Hashable]) -> list[Any] | None:
        once = [key for key, chunk in self.t1.items() if chunk.refs == 0 and key not in protected]
        often = [key for key, chunk in self.t2.items() if chunk.refs == 0 and key not in protected]
        victims: list[Any] = []
        size = len(self.t1)
        for _ in range(count):
            if once and size >= int(self.target):
                victims.append(once.pop(0))
                size -= 1
            elif often:
                victims.append(often.pop(0))
            elif once and self.falls_back:
                victims.append(once.pop(0))
                size -= 1
            else:
                return None
        for key in victims:
            if key in self.t1:
                del self.t1[key]
                self.b1[key] = None
            else:
                del self.t2[key]
                self.b2[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.capacity:
                del ghosts[next(iter(ghosts))]
        return victims

    def missed(self, keys: Sequence[Hashable]) -> None:
        pass

    def ended(self, access: Access) -> None:
        pass


class RequestArc(Arc):
    """0.32: learns once a request, and what a request only stored is not promoted."""

    def touch(self, keys: Sequence[Hashable]) -> None:
        raise AssertionError(f"0.32 does not touch, and {len(keys)} chunks were")

    def missed(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            self._learn(key)

    def ended(self, access: Access) -> None:
        for key in reversed(access.in_order()):
            if key in access.inserted and key not in access.reused:
                for part in (self.t1, self.t2):
                    if key in part:
                        part[key] = part.pop(key)
            elif key in access.reused and key in self.t1:
                self.t2[key] = self.t1.pop(key)
            elif key in access.reused and key in self.t2:
                self.t2[key] = self.t2.pop(key)


class HostTier:
    """Chunks in host memory."""

    def __init__(self, capacity: int, policy: str, touches: bool, arc_falls_back: bool) -> None:
        self.capacity = capacity
        self.touches = touches
        kinds: dict[tuple[str, bool], type[Lru | Arc]] = {
            ("lru", True): Lru,
            ("lru", False): RankedLru,
            ("arc", True): Arc,
            ("arc", False): RequestArc,
        }
        self.policy: Lru | Arc = kinds[policy, touches](capacity)
        if isinstance(self.policy, Arc):
            self.policy.falls_back = arc_falls_back
        self.used = 0  # slots that were ever handed out
        self.free: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.evicted: list[Hashable] = []  # in this step

    def get(self, key: Hashable) -> Chunk | None:
        return self.policy.chunks.get(key)

    def touch(self, keys: Sequence[Hashable]) -> None:
        if self.touches:
            self.policy.touch(keys)

    def prepare_load(self, keys: Sequence[Hashable], first: int, access: Access) -> list[int]:
        slots = []
        for position, key in enumerate(keys, first):
            chunk = self.policy.chunks[key]
            assert chunk.ready
            if chunk.refs == 0:
                self.policy.became_busy(key)
            chunk.refs += 1
            slots.append(chunk.slot)
            access.seen.setdefault(key, position)
        access.reuse(keys)
        return slots

    def load_done(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            chunk = self.policy.chunks[key]
            chunk.refs -= 1
            if chunk.refs == 0:
                self.policy.became_idle(key)

    def prepare_store(
        self, offered: Sequence[Hashable], first: int, access: Access
    ) -> list[tuple[Hashable, int]] | None:
        """The absent ones of those offered, each with its slot. None: no room, and nothing changed."""
        chunks = self.policy.chunks
        absent = [key for key in offered if key not in chunks]
        ready = [key for key in offered if key in chunks and chunks[key].ready]
        fresh_misses = [key for key in absent if key not in access.missed]
        self.policy.missed(fresh_misses)
        access.missed.update(fresh_misses)
        for position, key in enumerate(offered, first):
            if key in absent or key in ready:
                access.seen.setdefault(key, position)
        access.reuse(ready)
        if not absent:
            return []
        needed = len(absent) - (len(self.free) + self.capacity - self.used)
        if needed > 0:
            slots = {key: chunk.slot for key, chunk in chunks.items()}
            victims = self.policy.evict(needed, set(offered))
            if victims is None:
                return None
            self.free += [slots[key] for key in victims]
            self.evicted += victims
            self.events.append({"type": "removed", "h": victims})
        stored = []
        for key in absent:
            if self.used < self.capacity:
                slot, self.used = self.used, self.used + 1
            else:
                slot = self.free.pop()
            self.policy.insert(key, Chunk(slot))
            stored.append((key, slot))
        access.inserted.update(absent)
        return stored

    def store_done(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.policy.chunks[key].refs = 0
            self.policy.became_idle(key)
            self.events.append({"type": "stored", "h": [key]})
