"""The obvious prefix index: a set of blocks for every worker and tier."""

from __future__ import annotations

from collections import Counter

Who = tuple[int, int]  # worker, DP rank
TIERS = (1, 2, 3, 4)


class ModelIndex:
    """Everything in dictionaries, every question answered from the start."""

    def __init__(
        self, ttl_ms: float | None = None, max_blocks: int | None = None, copies: bool = False
    ) -> None:
        self.ttl_ms, self.max_blocks, self.copies = ttl_ms, max_blocks, copies
        self.held: dict[Who, Counter[tuple[int, int]]] = {}  # (tier, hash) → copies
        self.told: dict[Who, dict[tuple[int, int], float]] = {}  # in the order in which they were last told

    def store(self, who: Who, tier: int, hashes: list[int], now_ms: float) -> None:
        held, told = self.held.setdefault(who, Counter()), self.told.setdefault(who, {})
        for block in hashes:
            held[tier, block] = held[tier, block] + 1 if self.copies else 1
            told.pop((tier, block), None)
            told[tier, block] = now_ms
        self.expire(now_ms)

    def remove(self, who: Who, tier: int, hashes: list[int]) -> list[int]:
        """Return those that were not there."""
        unknown = []
        for block in hashes:
            if self.held.get(who, Counter())[tier, block] == 0:
                unknown.append(block)
                continue
            self.held[who][tier, block] -= 1
            if self.held[who][tier, block] == 0:
                self.forget(who, (tier, block))
        return unknown

    def forget(self, who: Who, block: tuple[int, int]) -> None:
        del self.held[who][block]
        del self.told[who][block]

    def clear(self, who: Who, tier: int | None) -> None:
        for block in [b for b in self.held.get(who, ()) if tier in (None, b[0])]:
            self.forget(who, block)

    def leave(self, who: Who) -> None:
        self.held.pop(who, None)
        self.told.pop(who, None)

    def expire(self, now_ms: float) -> int:
        gone = 0
        for who, told in self.told.items():
            for block, since in list(told.items()):
                old = self.ttl_ms is not None and since + self.ttl_ms <= now_ms
                if old or (self.max_blocks is not None and len(told) > self.max_blocks):
                    self.forget(who, block)
                    gone += 1
        return gone

    def find(self, hashes: list[int]) -> dict[Who, tuple[int, ...]]:
        out = {}
        for who, held in self.held.items():
            counts = Counter[int]()
            for block in hashes:
                tier = next((t for t in TIERS if held[t, block]), None)
                if tier is None:
                    break
                counts[tier] += 1
            out[who] = tuple(counts[t] for t in TIERS)
        return out

    def rows(self) -> list[tuple[int, int, int, int]]:
        return sorted((*who, tier, block) for who, held in self.held.items() for tier, block in held)
