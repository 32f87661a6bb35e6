"""A slow model of TensorRT-LLM's KV cache manager V2: pages of two levels, eviction lists, and the tree of blocks.

One group of pools. Pages have no numbers, and blocks are compared token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tokens = tuple[int, ...]
MOST_CHILDREN = 32
"""A node with so many children is not searched for a part of a block."""


class OutOfPages(Exception):
    """No level has room for what is needed."""


@dataclass(eq=False)
class Page:
    """The KV of one block in one group of layers."""

    life_cycle: int
    level: int = 0
    block: Block | None = None
    covered: int = 0
    """Tokens that it has of a block of the tree."""
    holders: int = 0
    locks: int = 0
    is_listed: bool = False
    is_gone: bool = False

    @property
    def is_free_to_drop(self) -> bool:
        return not self.locks and not self.holders


@dataclass(eq=False)
class Block:
    """A node of the tree; `parent` is None outside of it. A root has a scope in place of tokens."""

    tokens: Tokens
    parent: Block | None = None
    scope: Any = None
    children: dict[Tokens, Block] = field(default_factory=dict)
    pages: dict[int, Page] = field(default_factory=dict)
    users: int = 0

    @property
    def is_orphan(self) -> bool:
        return self.parent is None


class Store:
    """Pages of a device and perhaps a host, and the tree whose blocks they belong to."""

    def __init__(self, totals: list[int], block_size: int, windows: list[int | None]) -> None:
        self.totals = list(totals)
        self.free = list(totals)
        self.lists: list[list[Page]] = [[] for _ in totals]
        self.block_size = block_size
        self.windows = windows
        self.roots: dict[Any, Block] = {}
        self.copies: list[tuple[str, int]] = []
        self.last = len(totals) - 1

    def stale_end(self, life_cycle: int, history: int) -> int:
        """Blocks before this one are outside the window behind `history` tokens."""
        window = self.windows[life_cycle]
        return 0 if window is None else max(0, (history + 1 - window) // self.block_size)

    # ── A page's life ──

    def may_evict(self, page: Page) -> bool:
        if page.is_free_to_drop:
            return page.covered > 0
        return not page.locks and page.level < self.last

    def enlist(self, page: Page) -> None:
        if self.may_evict(page):
            self.lists[page.level].append(page)
            page.is_listed = True

    def delist(self, page: Page) -> None:
        self.lists[page.level].remove(page)
        page.is_listed = False

    def destroy(self, page: Page) -> None:
        if page.is_gone:
            return
        page.is_gone = True
        block = page.block
        if block is not None and block.pages.get(page.life_cycle) is page:
            del block.pages[page.life_cycle]
            page.block = None
            self.clear_behind(block, page.life_cycle)
        self.free[page.level] += 1

    def hold(self, page: Page) -> None:
        page.holders += 1
        if page.is_listed and not self.may_evict(page):
            self.delist(page)

    def unhold(self, page: Page) -> None:
        page.holders -= 1
        if not page.is_free_to_drop:
            return
        if not page.covered:
            if page.is_listed:
                self.delist(page)
            self.destroy(page)
            return
        if not page.is_listed:
            self.enlist(page)
        block = page.block
        if block is None or block.is_orphan or block.pages.get(page.life_cycle) is not page:
            self.delist(page)
            self.destroy(page)

    def lock(self, page: Page) -> None:
        if page.is_listed:
            self.delist(page)
        page.locks += 1

    def unlock(self, page: Page, *, keep: bool) -> None:
        """Release a lock; with `keep` the cache goes on holding the page."""
        page.locks -= 1
        page.holders += keep
        if page.locks:
            return
        if page.holders:
            if not page.is_listed:
                self.enlist(page)
        else:
            page.holders = 1
            self.unhold(page)

    # ── The tree ──

    def detach(self, block: Block) -> None:
        parent, block.parent = block.parent, None
        assert parent is not None
        del parent.children[block.tokens]
        if not parent.children and parent.scope is not None:
            self.roots.pop(parent.scope, None)

    def release(self, block: Block) -> None:
        """Free the unheld pages of a block that is neither used nor in the tree."""
        if block.users or not block.is_orphan:
            return
        for life_cycle, page in list(block.pages.items()):
            del block.pages[life_cycle]
            page.block = None
            if page.is_free_to_drop and page.is_listed:
                self.delist(page)
                self.destroy(page)

    def remove_subtree(self, block: Block) -> None:
        while block.children:
            self.remove_subtree(next(iter(block.children.values())))
        if block.parent is not None:
            self.detach(block)
        self.release(block)

    def clear_behind(self, block: Block, life_cycle: int) -> None:
        """Remove what is of no use without a block's page: all behind it, or nodes that have become empty."""
        if self.windows[life_cycle] is None:
            self.remove_subtree(block)
        while not block.is_orphan and life_cycle not in block.pages and not block.children:
            parent = block.parent
            self.detach(block)
            self.release(block)
            assert parent is not None
            block = parent

    def match(self, scope: Any, tokens: Tokens, *, partial: bool) -> list[tuple[Block, int]]:
        """Return the longest prefix in the tree: blocks, and the tokens used of each."""
        node = self.roots.get(scope)
        found: list[tuple[Block, int]] = []
        for start in range(0, len(tokens), self.block_size) if node is not None else ():
            assert node is not None
            part = tokens[start : start + self.block_size]
            if part in node.children:
                node = node.children[part]
                found.append((node, len(part)))
                continue
            if partial and len(node.children) < MOST_CHILDREN:
                common = [(_common(part, one.tokens), one) for one in node.children.values()]
                best = max((count for count, _ in common), default=0)
                if best:
                    found.append((next(one for count, one in common if count == best), best))
            break
        while (shorter := self._shorten(found)) is not found:
            found = shorter
        return found

    def _shorten(self, found: list[tuple[Block, int]]) -> list[tuple[Block, int]]:
        """Cut a match at the first page that it needs and does not have; the match itself if it has all."""
        if not found:
            return found
        length = self.block_size * (len(found) - 1) + found[-1][1]
        for life_cycle in range(len(self.windows)):
            for place in range(self.stale_end(life_cycle, length), len(found)):
                block, used = found[place]
                page = block.pages.get(life_cycle)
                covered = 0 if page is None else page.covered
                if covered < used:
                    return [*found[:place], *([(block, covered)] if covered else [])]
        return found

    # ── Room ──

    def make_room(self, level: int, goal: int, fallen: list[Page]) -> None:
        """Free `goal` pages of a level, and take in as many as fit of those that fell from the level above."""
        evictable, free = self.lists[level], self.free[level]
        held = [page for page in fallen if page.holders] if level == self.last else []
        if len(held) > free + len(evictable) or free + len(evictable) - len(held) < goal:
            for page in [one for one in fallen if one.is_free_to_drop]:
                self.destroy(page)
            raise OutOfPages
        taken = evictable[: max(0, goal + len(fallen) - free)]
        del evictable[: len(taken)]
        for page in taken:
            page.is_listed = False
        if level == self.last:
            for page in reversed(taken):
                self.destroy(page)
            fallen = [*(page for page in fallen if not page.holders), *held]
            room = min(self.free[level] - goal, len(fallen))
            for page in reversed(fallen[: len(fallen) - room]):
                self.destroy(page)
        else:
            fallen = taken + fallen
            room = min(free + len(taken) - goal, len(fallen))
            self.make_room(level + 1, 0, fallen[: len(fallen) - room])
        for source, pages in _by_level(fallen[len(fallen) - room :]).items():
            self.move(pages, source, level)
            for page in pages:
                if level < self.last or page.is_free_to_drop:
                    self.enlist(page)

    def move(self, pages: list[Page], source: int, target: int) -> None:
        self.copies.append((f"{_LEVELS[source]}>{_LEVELS[target]}", len(pages)))
        for page in pages:
            self.free[source] += 1
            self.free[target] -= 1
            page.level = target

    def take(self, count: int) -> None:
        """Take free pages of the device, evicting others if there are too few. OutOfPages: nothing was taken."""
        if count > self.free[0]:
            self.make_room(0, count, [])
        self.free[0] -= count

    def lock_all(self, pages: list[Page]) -> None:
        """Lock pages and bring those of the host to the device, all or none."""
        listed = [page for page in pages if page.is_listed]
        for page in listed:
            self.delist(page)
        below = [page for page in pages if page.level]
        try:
            self.make_room(0, len(below), [])
        except OutOfPages:
            for page in listed:
                self.enlist(page)
            raise
        for source, some in _by_level(below).items():
            self.move(some, source, 0)
        for page in pages:
            self.lock(page)


_LEVELS = ("device", "host")


def _common(part: Tokens, other: Tokens) -> int:
    pairs = enumerate(zip(part, other, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(part), len(other)))


def _by_level(pages: list[Page]) -> dict[int, list[Page]]:
    out: dict[int, list[Page]] = {}
    for page in pages:
        out.setdefault(page.level, []).append(page)
    return out
