"""A slow, obvious reference of the token hashes, on top of the `xxhash` package."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

MASK64 = 2**64 - 1
BASE_SALT = 1337

Run = tuple[int, int, int]  # mm_hash, offset, length


def salt_hash(salt: str = "", lora: str = "") -> int:
    total = BASE_SALT
    if lora:
        total += xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        total += xxh3_64_intdigest(salt.encode(), 1)
    return total & MASK64


def chain(parent: int, local: int) -> int:
    return xxh3_64_intdigest(struct.pack("<QQ", parent, local), 1337)


def fragment_bits(position: int) -> int:
    return 54 if position < 2**8 else 46 if position < 2**16 else 38


def lineage_hash(current: int, parent: int | None, position: int) -> int:
    bits = fragment_bits(position)
    mode = {54: 0, 46: 1, 38: 2}[bits]
    fragment = (parent or 0) & ((1 << bits) - 1)
    return mode << 126 | position << (64 + bits) | current << bits | fragment


@dataclass(frozen=True)
class Block:
    """Identity of one complete block."""

    local: int
    sequence: int
    parent: int | None
    position: int

    @property
    def lineage(self) -> int:
        return lineage_hash(self.sequence, self.parent, self.position)


@dataclass
class TokenBlocks:
    """Recomputes everything from the tokens each time it is asked."""

    block_size: int = 16
    salt: int = BASE_SALT
    tokens: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def extend(self, tokens: list[int], runs: list[Run] = []) -> range:  # noqa: B006
        before = len(self.tokens) // self.block_size
        shift = len(self.tokens)
        self.tokens += tokens
        self.runs = sorted(
            [*self.runs, *((mm, offset + shift, n) for mm, offset, n in runs)], key=lambda r: r[1]
        )
        return range(before, len(self.tokens) // self.block_size)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.runs = [(mm, offset, min(n, length - offset)) for mm, offset, n in self.runs if offset < length]

    def slot_bytes(self, position: int) -> bytes:
        for mm, offset, length in self.runs:
            if offset <= position < offset + length:
                return struct.pack("<BIQ", 1, position - offset, mm)
        return struct.pack("<BIQ", 0, self.tokens[position], 0)

    def block_bytes(self, index: int) -> bytes:
        start, stop = index * self.block_size, (index + 1) * self.block_size
        if any(offset < stop and start < offset + length for _, offset, length in self.runs):
            return b"".join(self.slot_bytes(position) for position in range(start, stop))
        return struct.pack(f"<{self.block_size}I", *self.tokens[start:stop])

    def blocks(self) -> list[Block]:
        out: list[Block] = []
        for index in range(len(self.tokens) // self.block_size):
            local = xxh3_64_intdigest(self.block_bytes(index), self.salt)
            parent = out[-1].sequence if out else None
            out.append(Block(local, local if parent is None else chain(parent, local), parent, index))
        return out
