"""Steps of the slow model of several KV groups: how far a step goes, the blocks it takes, and the keys they get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.grouped_device import Block, Device, Group, Key, Sizes


@dataclass
class Table:
    """Blocks of a request in one group, and how far they have been considered for keys."""

    blocks: list[Block | None] = field(default_factory=list)
    keyed: int = 0
    tail: str = ""
    """"found": the last block belongs to a hit; "own": to this request, and is cached."""
    checkpoint: tuple[int, int] | None = None
    """Tokens and index of a state that is kept inside a step."""


@dataclass
class Request:
    contents: list[int]
    prompt: int
    known: int
    tables: list[Table]
    hit: int = 0
    junction: int = 0
    computed: int = 0
    keyed: int = 0
    copies: list[Block] = field(default_factory=list)
    """Blocks to release when the schedule ends, in that order."""
    started: bool = False

    def key(self, group: int, end: int, unit: int) -> Key:
        return group, end, self.contents[end // unit - 1]


class GroupedSteps:
    """Requests on a device, one step after another; `take` makes room."""

    def __init__(self, groups: list[Group], sizes: Sizes, device: Device, retention: int | None) -> None:
        self.groups, self.sizes, self.device, self.retention = groups, sizes, device, retention

    def take(self, count: int) -> list[Block]:
        raise NotImplementedError

    def step(self, request: Request) -> None:
        start = request.computed
        # The first step is split as if it began behind the hit, although it computes a part of the hit again.
        again = 0 if request.started else request.hit - start
        end = self.split(request, start + again, request.known + again) - again
        if request.started:
            self.slide(request)
            self.grow(request, start, end)
            self.key(request, end)
        else:
            request.started = True
            self.grow(request, request.hit, max(request.hit, end))
            self.key(request, max(request.hit, end))
        for block in request.copies:
            self.device.release([block])
        request.copies.clear()
        request.computed = end

    # ── How far a step goes ──

    def split(self, request: Request, start: int, end: int) -> int:
        """Return the end of a step that could compute up to `end`: states are kept at certain positions only."""
        states = [group for group in self.groups if group.is_state]
        stop = max(request.prompt, request.known - 1)
        if not states or start >= stop:
            return end
        block, unit, prompt = self.sizes.block, self.sizes.hash, request.prompt
        whole = unit if self.sizes.partial else self.sizes.common
        is_internal = all(group.checkpoint for group in states) and self.is_inside(
            start, end, (stop - 1) // whole * whole, block
        )
        last = 0 if is_internal else (request.known - 1) // block * block
        points = [last]
        if start % block and not is_internal:
            points.append(-(-start // block) * block)
        tail = (prompt - 1) // unit * unit
        if self.sizes.partial and not is_internal and last < tail < prompt:
            points.append(tail)
        if start < request.junction < end:
            points.append(start + (request.junction - start) // block * block)
        return min([end, *(point for point in points if start < point < end)])

    def is_inside(self, start: int, end: int, point: int, block: int) -> bool:
        """Return whether a step from `start` to `end` can keep the state at `point`."""
        before = (start - 1) // block if start else -1
        unit = self.sizes.hash
        return start % unit == 0 and -(-end // block) - 2 > before and start + unit <= point < end

    # ── Blocks ──

    def slide(self, request: Request) -> None:
        computed = request.computed
        for group, table in zip(self.groups, request.tables, strict=True):
            first, end = 0, group.first_needed(computed)
            if group.name == "rswa":
                first = -(-request.prompt // group.block)
                end = max(request.prompt, computed - group.window) // group.block
            end = max(first, min(end, len(table.blocks)))
            self.device.release([block for block in table.blocks[first:end] if block is not None])
            table.blocks[first:end] = [None] * (end - first)

    def grow(self, request: Request, start: int, slots: int) -> None:
        """Take blocks for `slots` tokens, of which `start` are computed or found."""
        wanted = []
        for group, table in zip(self.groups, request.tables, strict=True):
            table.checkpoint = (
                self.checkpoint(request, group, table, start, slots) if group.is_state else None
            )
            size = 1 if group.name == "circular" else -(-slots // group.block)
            missing = max(0, size - len(table.blocks))
            if group.is_state:
                missing = min(missing, 2 if table.checkpoint else 1)
            wanted.append((size, missing))
        copies = sum(table.tail != "" for table in request.tables)
        blocks = self.take(sum(missing for _, missing in wanted) + copies)
        for table, (size, missing) in zip(request.tables, wanted, strict=True):
            if table.tail:
                self.copy_tail(request, table, blocks.pop())
            if size > len(table.blocks):
                table.blocks += [None] * (size - missing - len(table.blocks))
                table.blocks += [blocks.pop() for _ in range(missing)]

    def copy_tail(self, request: Request, table: Table, copy: Block) -> None:
        source = table.blocks[-1]
        assert source is not None
        if table.tail == "found":
            table.blocks[-1] = copy
            request.copies.append(source)
        else:
            self.device.move_keys(source, copy)
            request.copies.append(copy)
        table.tail = ""

    def checkpoint(
        self, request: Request, group: Group, table: Table, start: int, end: int
    ) -> tuple[int, int] | None:
        stop = max(request.prompt, request.known - 1)
        if not group.checkpoint or (self.retention == 0 and end < stop):
            return None
        point = (end - 1) // self.sizes.hit * self.sizes.hit
        index = -(-end // group.block) - 2
        is_taken = 0 <= index < len(table.blocks) and table.blocks[index] is not None
        return (point, index) if self.is_inside(start, end, point, group.block) and not is_taken else None

    # ── Keys ──

    def key(self, request: Request, tokens: int) -> None:
        common = self.sizes.common
        tokens = tokens if self.sizes.partial else tokens // common * common
        request.keyed = max(request.keyed, tokens)
        for g, group in enumerate(self.groups):
            if not group.is_cached:
                continue
            self.key_range(request, g, tokens)
            if group.is_state:
                self.key_state(request, g, tokens)
            elif group.name == "full":
                self.key_tail(request, g, tokens)

    def key_range(self, request: Request, g: int, tokens: int) -> None:
        group, table = self.groups[g], request.tables[g]
        for index in range(table.keyed, tokens // group.block):
            block, end = table.blocks[index], (index + 1) * group.block
            if block is not None and self.keeps(request, group, index, reach=True):
                self.device.drop_shorter(block, end)
                self.device.name(block, request.key(g, end, self.sizes.hash))
        table.keyed = max(table.keyed, tokens // group.block)

    def keeps(self, request: Request, group: Group, index: int, *, reach: bool) -> bool:
        """Return whether a computed block gets a key; with `reach`, also at the ends of prompt and junction."""
        if not group.slides and not group.is_state:
            return True
        need = group.window_blocks if group.slides else 1
        if self.retention is None:
            period = self.sizes.hit // group.block
            return group.is_state or need >= period or index % period >= period - need
        ends = [
            position // self.sizes.hit * self.sizes.hit // group.block
            for position in (request.prompt - 1, request.junction)
        ]
        return reach and any(end - need <= index < end for end in ends)

    def key_state(self, request: Request, g: int, tokens: int) -> None:
        group, table, unit = self.groups[g], request.tables[g], self.sizes.hash
        if table.checkpoint is not None:
            end, index = table.checkpoint
            block = table.blocks[index]
            assert block is not None
            is_kept = end in ((request.prompt - 1) // self.sizes.hit * self.sizes.hit, request.junction) or (
                end % group.block == 0 and self.keeps(request, group, end // group.block - 1, reach=False)
            )
            if not is_kept:
                self.device.drop(block, block.keys)
            elif not block.has_end(end):
                self.replace_keys(block, request.key(g, end, unit))
            return
        index = -(-tokens // group.block) - 1
        if tokens != (request.prompt - 1) // unit * unit or not 0 <= index < len(table.blocks):
            return
        block = table.blocks[index]
        if block is None:
            return
        if max((key[1] for key in block.keys), default=0) != tokens:
            self.replace_keys(block, request.key(g, tokens, unit))
        if tokens % group.block:
            table.tail, table.keyed = "own", index

    def key_tail(self, request: Request, g: int, tokens: int) -> None:
        group, blocks, unit = self.groups[g], request.tables[g].blocks, self.sizes.hash
        end = (request.prompt - 1) // unit * unit
        if not 0 < end <= tokens or end % group.block == 0 or end // group.block >= len(blocks):
            return
        block = blocks[end // group.block]
        assert block is not None
        self.device.drop_shorter(block, end)
        if not block.has_end(end):
            self.device.name(block, request.key(g, end, unit))

    def replace_keys(self, block: Block, key: Key) -> None:
        self.device.drop(block, block.keys)
        self.device.name(block, key)
