"""A slow model of one worker with several KV groups and tiers, for requests that run one after another.

A block of the device has keys (group, end in tokens, content) or none. Copies down take no time; every block that comes
up takes a millisecond on each hop. A step computes as much of a request as states allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.grouped_device import Block, Device, Group, Key, Lower, Sizes
from model.grouped_steps import GroupedSteps, Request, Table


@dataclass
class Outcome:
    """What a request got: tokens found, tokens by lower tier, and the time that it waited for a load."""

    hit: int = 0
    below: list[int] = field(default_factory=lambda: [0, 0, 0])
    parked_ms: int = 0


class TieredGroups(GroupedSteps):
    """One worker: `run` plays a request to its end."""

    def __init__(
        self,
        groups: list[Group],
        blocks: int,
        host: int,
        disk: int | None = None,
        *,
        write_through: bool = True,
        exclusive: bool = False,
        retention: int | None = 0,
        match_unit: int = 0,
    ) -> None:
        sizes = Sizes(groups, match_unit)
        super().__init__(groups, sizes, Device(blocks, groups, sizes), retention)
        self.host = Lower(host)
        self.disk = None if disk is None else Lower(disk)
        self.write_through, self.exclusive = write_through, exclusive
        self.offloaded = self.onboarded = 0

    # ── Where blocks are ──

    def tier_of(self, key: Key) -> int:
        """Return the highest tier that has the block; 9 if none has."""
        if self.device.find(key):
            return 1
        if key in self.host.order:
            return 2
        return 3 if self.disk is not None and key in self.disk.order else 9

    def needed(self, contents: list[int], kind: list[int], tokens: int, limit: int, lowest: int) -> list[Key]:
        """Return what a hit of `tokens` tokens needs in the groups of one kind."""
        group, unit = self.groups[kind[0]], self.sizes.hash
        ends = [(i + 1) * group.block for i in range(group.first_needed(tokens), tokens // group.block)]
        if tokens % group.block:
            last = tokens
            if group.is_full:  # a longer prefix in the same block serves as well
                highest = min(limit, -(-tokens // group.block) * group.block) // unit * unit
                served = [
                    end
                    for worst in (1, lowest)
                    for end in range(highest, tokens - 1, -unit)
                    if all(self.tier_of((g, end, contents[end // unit - 1])) <= worst for g in kind)
                ]
                last = next(iter(served), tokens)
            ends.append(last)
        return [(g, end, contents[end // unit - 1]) for g in kind for end in ends]

    def longest(
        self, contents: list[int], limit: int, lowest: int, kinds: list[list[int]] | None = None
    ) -> int:
        """Return the longest hit whose blocks are all on tiers down to `lowest`."""
        kinds = self.sizes.kinds if kinds is None else kinds
        for tokens in range(limit // self.sizes.hit * self.sizes.hit, 0, -self.sizes.hit):
            keys = [key for kind in kinds for key in self.needed(contents, kind, tokens, limit, lowest)]
            if all(self.tier_of(key) <= lowest for key in keys):
                return tokens
        return 0

    def usable(self, tokens: int) -> int:
        """Return a hit's tokens, or 0 if all of them would be computed again."""
        return 0 if tokens <= self.sizes.replay else tokens

    # ── Copies ──

    def offer(self, keys: list[tuple[Key, bool]], *, evicted: bool) -> list[Key]:
        """Copy blocks to the host, parents first, and from there to the disk; return those copied."""
        here = [key for key, _ in keys if key in self.host.order]
        self.host.use(here[::-1] if evicted else here)
        stored = self.host.store([key for key, is_last in keys if is_last])
        self.offloaded += len(stored)
        if self.disk is not None:
            lower = self.disk.store(stored)
            self.host.use([key for key in reversed(stored) if key not in lower])
            self.host.use([key for key in reversed(stored) if key in lower])
        return stored

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
        if not self.exclusive:
            self.host.order += reversed(to_load)
        self.device.release(pins)
        self.onboarded += len(to_load)
        outcome.parked_ms = len(to_load) + len(staged)
        self.count_origins(tiers, outcome, known, tokens)
        return True

    def count_origins(self, tiers: dict[Key, int], outcome: Outcome, known: int, tokens: int) -> None:
        unit = self.sizes.hash
        for start in range(known, tokens - self.sizes.replay, unit):
            covering = [
                tier
                for (g, end, _), tier in tiers.items()
                if (end - 1) // self.groups[g].block * self.groups[g].block <= start < end
            ]
            if max([1, *covering]) > 1:
                outcome.below[max(covering) - 2] += min(unit, tokens - self.sizes.replay - start)

    # ── A request ──

    def run(self, contents: list[int], prompt: int, outputs: int) -> Outcome:
        outcome = Outcome()
        limit = prompt - 1
        known = self.usable(self.longest(contents, limit, 1))
        for lowest in range(2 if self.disk is None else 3, 1, -1):
            tokens = self.usable(self.longest(contents, limit, lowest))
            if tokens <= known:
                break
            keys = [
                key for kind in self.sizes.kinds for key in self.needed(contents, kind, tokens, limit, lowest)
            ]
            if self.load(sorted(keys, key=lambda key: (key[1], key[0])), outcome, known, tokens):
                break
        request = Request(contents, prompt, prompt, [Table() for _ in self.groups])
        self.adopt(request, limit)
        outcome.hit = request.computed
        through = received = 0
        while received < outputs:
            self.step(request)
            if self.write_through:
                through = self.offer_keyed(request, through)
            if request.computed == request.known:
                received += 1
                request.known += 1
        for table in request.tables:
            self.device.release([block for block in table.blocks if block is not None])
        return outcome

    def adopt(self, request: Request, limit: int) -> None:
        """Reference the blocks of the longest hit on the device."""
        contents = request.contents
        longest = self.longest(contents, limit, 1)
        first = self.longest(contents, limit, 1, self.sizes.kinds[:1])
        request.junction = first if first > longest else 0
        hit = request.hit = request.keyed = self.usable(longest)
        request.computed = hit - min(hit, self.sizes.replay)
        if hit == 0:
            return
        found: dict[int, list[Key]] = {g: [] for g in range(len(self.groups))}
        for kind in self.sizes.kinds:
            for key in self.needed(contents, kind, hit, limit, 1):
                found[key[0]].append(key)
        for g, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            table.blocks = [None] * group.first_needed(hit)
            for key in found[g]:
                block = self.device.find(key)
                assert block is not None
                self.device.reference(block)
                table.blocks.append(block)
            table.keyed = len(table.blocks)
            if found[g] and hit % group.block:
                table.keyed, table.tail = hit // group.block, "found"

    def offer_keyed(self, request: Request, through: int) -> int:
        """Offer the request's blocks behind unit `through` that have a key; return the units offered by now."""
        unit = self.sizes.hash
        full = max(through, min(request.keyed, request.computed) // unit)
        blocks = {
            request.key(g, end, unit): block
            for end in range((through + 1) * unit, full * unit + 1, unit)
            for g in range(len(self.groups))
            if (block := self.keyed_block(request, g, end))
        }
        stored = self.offer([(key, True) for key in blocks], evicted=False)
        for key in reversed(stored):
            if blocks[key].refs == 0:  # the copy has used it
                self.device.reference(blocks[key])
                self.device.release([blocks[key]])
        return full

    def keyed_block(self, request: Request, g: int, end: int) -> Block | None:
        """Return the request's block that lookups find by the key of `end`."""
        group, blocks = self.groups[g], request.tables[g].blocks
        if not group.is_cached or not self.sizes.is_found_by(group, end):
            return None
        index = (end - 1) // group.block
        block = blocks[index] if index < len(blocks) else None
        if block is not None and block.has_end(end):
            return block
        is_kept = end in ((request.prompt - 1) // self.sizes.hit * self.sizes.hit, request.junction)
        return self.device.find(request.key(g, end, self.sizes.hash)) if group.is_state and is_kept else None
