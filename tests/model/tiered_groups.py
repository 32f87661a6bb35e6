"""A slow model of one worker with several KV groups and tiers, for requests that run one after another.

A block is a key (group, end in tokens, content) or has none. Copies down take no time; every block that comes up takes
a millisecond on each hop. Sizes are in tokens; the first group with `window` and `chunk` zero is full attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Key = tuple[int, int, int]
"""Group, end in tokens, content."""


@dataclass(frozen=True)
class Group:
    block: int
    window: int = 0
    chunk: int = 0

    def first_needed(self, tokens: int) -> int:
        """Return the first block that a token behind `tokens` tokens reads."""
        if self.window:
            return max(0, tokens - self.window + 1) // self.block
        return tokens // self.chunk * self.chunk // self.block if self.chunk else 0

    @property
    def window_blocks(self) -> int:
        return -(-(self.window - 1) // self.block)


class Block:
    """A block of the device; free when no reference is left."""

    def __init__(self) -> None:
        self.key: Key | None = None
        self.refs = 1


class Device:
    """Blocks without a key are taken before cached ones, and those from the least recently released on."""

    def __init__(self, blocks: int) -> None:
        self.empty = blocks
        self.cached: list[Block] = []
        self.keyed: dict[Key, list[Block]] = {}

    def take(self, count: int) -> tuple[list[Block], list[Key]]:
        """Return new blocks and the keys that had to go, in the order in which they went."""
        gone = []
        for _ in range(count):
            if self.empty > 0:
                self.empty -= 1
                continue
            block = self.cached.pop(0)
            assert block.key is not None
            self.keyed[block.key].remove(block)
            gone.append(block.key)
        last = [key for i, key in enumerate(gone) if not self.keyed[key] and key not in gone[i + 1 :]]
        return [Block() for _ in range(count)], last

    def find(self, key: Key) -> Block | None:
        return next(iter(self.keyed.get(key, [])), None)

    def reference(self, block: Block) -> None:
        if block.refs == 0:
            self.cached.remove(block)
        block.refs += 1

    def release(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs > 0:
                continue
            if block.key is None:
                self.empty += 1
            else:
                self.cached.append(block)

    def name(self, block: Block, key: Key) -> None:
        block.key = key
        self.keyed.setdefault(key, []).append(block)


class Lower:
    """A tier that evicts the least recently used key."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.order: list[Key] = []

    def store(self, keys: list[Key]) -> list[Key]:
        """Store those of `keys` that are missing, as many as fit; the last is the first to go. Return them."""
        stored = [key for key in keys if key not in self.order][: self.blocks]
        self.make_room(len(stored))
        self.order += reversed(stored)
        return stored

    def make_room(self, count: int) -> None:
        del self.order[: max(0, len(self.order) + count - self.blocks)]

    def use(self, keys: list[Key]) -> None:
        for key in keys:
            self.order.remove(key)
            self.order.append(key)


@dataclass
class Outcome:
    """What a request got: tokens found, tokens by lower tier, and the time that it waited for a load."""

    hit: int = 0
    below: list[int] = field(default_factory=lambda: [0, 0, 0])
    parked_ms: int = 0


class TieredGroups:
    """One worker: `run` plays a request to its end."""

    def __init__(
        self,
        groups: list[Group],
        blocks: int,
        host: int,
        disk: int | None = None,
        *,
        write_through: bool = True,
        retention: int | None = 0,
    ) -> None:
        self.groups = groups
        self.device, self.host = Device(blocks), Lower(host)
        self.disk = None if disk is None else Lower(disk)
        self.write_through, self.retention = write_through, retention
        self.unit = math.lcm(*(group.block for group in groups))
        self.hash = math.gcd(*(group.block for group in groups))
        self.offloaded = self.onboarded = 0

    # ── Where blocks are ──

    def needed(self, contents: list[int], tokens: int) -> list[Key]:
        """Return what a hit of `tokens` tokens needs, in the order of ends."""
        keys = [
            (g, end, contents[end // self.hash - 1])
            for g, group in enumerate(self.groups)
            for end in range((group.first_needed(tokens) + 1) * group.block, tokens + 1, group.block)
        ]
        return sorted(keys, key=lambda key: (key[1], key[0]))

    def tier_of(self, key: Key) -> int | None:
        if self.device.find(key):
            return 1
        if key in self.host.order:
            return 2
        return 3 if self.disk is not None and key in self.disk.order else None

    def longest(self, contents: list[int], limit: int, lowest: int) -> int:
        """Return the longest hit whose blocks are all on tiers down to `lowest`."""
        for tokens in range(limit // self.unit * self.unit, 0, -self.unit):
            if all((self.tier_of(key) or 9) <= lowest for key in self.needed(contents, tokens)):
                return tokens
        return 0

    # ── Copies ──

    def offer(self, keys: list[Key], *, evicted: bool) -> None:
        """Copy blocks to the host, parents first, and from there to the disk."""
        here = [key for key in keys if key in self.host.order]
        self.host.use(here[::-1] if evicted else here)
        stored = self.host.store(keys)
        self.offloaded += len(stored)
        if self.disk is None:
            return
        lower = self.disk.store(stored)
        self.host.use([key for key in reversed(stored) if key not in lower])
        self.host.use([key for key in reversed(stored) if key in lower])

    def take(self, count: int) -> list[Block]:
        blocks, gone = self.device.take(count)
        if not self.write_through and gone:
            self.offer(gone[::-1], evicted=True)
        return blocks

    def load(self, keys: list[Key], outcome: Outcome, known: int, tokens: int) -> bool:
        """Bring the blocks to the device; False: the host has no room to stage those of the disk."""
        tiers = {key: self.tier_of(key) for key in keys}
        to_load = [key for key in keys if tiers[key] != 1]
        staged = [key for key in keys if tiers[key] == 3]
        pins = [block for key in keys if tiers[key] == 1 and (block := self.device.find(key))]
        for block in pins:
            self.device.reference(block)
        from_host = [key for key in to_load if tiers[key] == 2]
        for key in from_host:
            self.host.order.remove(key)  # referenced: not evicted
        self.host.blocks -= len(from_host)
        for key in staged:
            assert self.disk is not None
            self.disk.order.remove(key)
        if self.disk is not None:
            self.disk.blocks -= len(staged)
        slots = self.take(len(to_load))
        fits = len(staged) <= self.host.blocks
        if fits:
            self.host.make_room(len(staged))
        self.host.blocks += len(from_host)
        if self.disk is not None:
            self.disk.blocks += len(staged)
            self.disk.order += reversed(staged)
        if not fits:
            self.host.order += reversed(from_host)
            self.device.release(slots)
            self.device.release(pins)
            return False
        for block, key in zip(slots, to_load, strict=True):
            self.device.name(block, key)
        self.device.release(slots)
        self.host.order += reversed(to_load)
        self.device.release(pins)
        self.onboarded += len(to_load)
        outcome.parked_ms = len(to_load) + len(staged)
        for end in range(known + self.hash, tokens + 1, self.hash):
            covering = [tiers[key] for key in keys if key[1] - self.groups[key[0]].block < end <= key[1]]
            lowest = max(tier for tier in [1, *covering] if tier is not None)
            if lowest > 1:
                outcome.below[lowest - 2] += self.hash
        return True

    # ── A request ──

    def keeps(self, group: Group, index: int, prompt: int, junction: int) -> bool:
        """Whether a computed block gets a key."""
        if not group.window:
            return True
        need = group.window_blocks
        if self.retention is None:
            period = self.unit // group.block
            return need >= period or index % period >= period - need
        ends = [prompt - 1, junction]
        return any(
            end // self.unit * self.unit // group.block - need
            <= index
            < end // self.unit * self.unit // group.block
            for end in ends
        )

    def run(self, contents: list[int], prompt: int, outputs: int) -> Outcome:
        outcome = Outcome()
        known = self.longest(contents, prompt - 1, 1)
        for lowest in range(2 if self.disk is None else 3, 1, -1):
            tokens = self.longest(contents, prompt - 1, lowest)
            if tokens <= known or self.load(self.needed(contents, tokens), outcome, known, tokens):
                break
        hit = outcome.hit = self.longest(contents, prompt - 1, 1)
        full = max(
            (
                tokens
                for tokens in range(0, prompt, self.unit)
                if all(self.device.find(key) for key in self.needed_by_full(contents, tokens))
            ),
            default=0,
        )
        junction = full if full > hit else 0
        tables: list[list[Block | None]] = []
        for g, group in enumerate(self.groups):
            first = group.first_needed(hit)
            table: list[Block | None] = [None] * first
            for end in range((first + 1) * group.block, hit + 1, group.block):
                block = self.device.find((g, end, contents[end // self.hash - 1]))
                assert block is not None
                self.device.reference(block)
                table.append(block)
            tables.append(table)
        keyed, offered = hit, 0
        for end in range(prompt, prompt + outputs):
            if end > prompt:
                self.slide(tables, end - 1)
            self.grow(tables, end)
            for g, group in enumerate(self.groups):
                for index in range(keyed // group.block, end // self.unit * self.unit // group.block):
                    block = tables[g][index]
                    if block is not None and self.keeps(group, index, prompt, junction):
                        stop = (index + 1) * group.block
                        self.device.name(block, (g, stop, contents[stop // self.hash - 1]))
            keyed = max(keyed, end // self.unit * self.unit)
            if self.write_through and keyed > offered:
                self.offer(self.held(tables, offered, keyed), evicted=False)
                offered = keyed
        for table in tables:
            self.device.release([block for block in table if block is not None])
        return outcome

    def needed_by_full(self, contents: list[int], tokens: int) -> list[Key]:
        return [
            key
            for key in self.needed(contents, tokens)
            if not (self.groups[key[0]].window or self.groups[key[0]].chunk)
        ]

    def slide(self, tables: list[list[Block | None]], computed: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            end = min(group.first_needed(computed), len(table))
            self.device.release([block for block in table[:end] if block is not None])
            table[:end] = [None] * end

    def grow(self, tables: list[list[Block | None]], tokens: int) -> None:
        missing = [
            max(0, -(-tokens // group.block) - len(table))
            for group, table in zip(self.groups, tables, strict=True)
        ]
        blocks = self.take(sum(missing))
        for table, count in zip(tables, missing, strict=True):
            table += [blocks.pop() for _ in range(count)]

    def held(self, tables: list[list[Block | None]], first: int, end: int) -> list[Key]:
        """Return the keys of the request's blocks that end behind `first` and up to `end`, in the order of ends."""
        keys = {
            block.key for table in tables for block in table if block is not None and block.key is not None
        }
        return sorted((key for key in keys if first < key[1] <= end), key=lambda key: (key[1], key[0]))
