"""A slow model of TensorRT-LLM's KV cache manager V2: the cache of one request."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model.trtllm_pages import Block, OutOfPages, Page, Store, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(eq=False)
class Slot:
    """A block of a request: its pages by life cycle, whether each is locked, and its node once it is committed."""

    pages: dict[int, Page] = field(default_factory=dict)
    locked: dict[int, bool] = field(default_factory=dict)
    node: Block | None = None


class RequestCache:
    """Pages of one request: matched, grown, committed, suspended and resumed."""

    def __init__(
        self, store: Store, scope: Any, tokens: Tokens | None, *, partial: bool, minimal: bool
    ) -> None:
        """Match `tokens` (None: no reuse) and hold what was found. `minimal`: only ends of prompts are kept."""
        self.store, self.scope, self.minimal = store, scope, minimal
        self.is_active, self.is_fresh, self.is_committing = False, True, True
        self.tokens: list[int] = []
        self.capacity = self.history = self.committed_blocks = 0
        self.slots: list[Slot] = []
        found = [] if tokens is None else store.match(scope, tokens, partial=partial)
        if not found:
            return
        assert tokens is not None
        count = store.block_size * (len(found) - 1) + found[-1][1]
        self.tokens = list(tokens[:count])
        self.capacity = self.history = count
        self.committed_blocks = count // store.block_size
        for node, _ in found:
            self.slots.append(Slot(node=node))
            node.users += 1
        for life_cycle in range(len(store.windows)):
            for place in range(store.stale_end(life_cycle, count), len(found)):
                page = found[place][0].pages[life_cycle]
                store.hold(page)
                self.slots[place].pages[life_cycle] = page
                self.slots[place].locked[life_cycle] = False

    def live_pages(self) -> Iterator[tuple[Slot, int]]:
        for life_cycle in range(len(self.store.windows)):
            for slot in self.slots[self.store.stale_end(life_cycle, self.history) :]:
                yield slot, life_cycle

    def drop(self, slot: Slot, life_cycle: int) -> None:
        page, is_locked = slot.pages.pop(life_cycle), slot.locked.pop(life_cycle)
        if is_locked:
            self.store.unlock(page, keep=False)
        else:
            self.store.unhold(page)

    def give(self, slot: Slot, life_cycle: int) -> None:
        """Give a slot a new page, whose room has been taken."""
        slot.pages[life_cycle] = Page(life_cycle, locks=1)
        slot.locked[life_cycle] = True

    # ── Suspend and resume ──

    def resume(self, limit: float) -> bool:
        store = self.store
        used = store.totals[0] - store.free[0] - len(store.lists[0])
        if used / store.totals[0] > limit:
            return False
        has_part = self.is_fresh and len(self.tokens) % store.block_size != 0
        cycles = range(len(store.windows))
        if has_part:
            try:
                store.take(len(cycles))
            except OutOfPages:
                return False
        live = list(self.live_pages())
        try:
            store.lock_all([slot.pages[life_cycle] for slot, life_cycle in live])
        except OutOfPages:
            if has_part:
                store.free[0] += len(cycles)
            return False
        for slot, life_cycle in live:
            slot.pages[life_cycle].holders -= 1
            slot.locked[life_cycle] = True
        if has_part:
            self._copy_part(self.slots[(len(self.tokens) - 1) // store.block_size])
        self.is_fresh, self.is_active = False, True
        return True

    def _copy_part(self, slot: Slot) -> None:
        """Replace the pages of a partly matched block by copies of its own."""
        cycles = range(len(self.store.windows))
        self.store.copies += [("device>device", 1) for _ in cycles]
        for life_cycle in cycles:
            self.drop(slot, life_cycle)
        for life_cycle in cycles:
            self.give(slot, life_cycle)
        self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        node, slot.node = slot.node, None
        if node is not None:
            node.users -= 1
            self.store.release(node)

    def suspend(self) -> None:
        for slot, life_cycle in self.live_pages():
            slot.locked[life_cycle] = False
            self.store.unlock(slot.pages[life_cycle], keep=True)
        self.is_active = False

    # ── Size ──

    def resize(self, capacity: int | None = None, history: int | None = None) -> bool:
        """Set the capacity and the history; False if pages are lacking, and then nothing has changed."""
        store = self.store
        capacity = self.capacity if capacity is None else capacity
        history = self.history if history is None else history
        left = self._leave_stale(history) if history != self.history else []
        before, after = len(self.slots), -(-capacity // store.block_size)
        for _ in range(after, before):
            self._pop()
        first = {one: max(store.stale_end(one, history), before) for one in range(len(store.windows))}
        needed = sum(max(0, after - one) for one in first.values())
        try:
            if needed:
                store.take(needed)
        except OutOfPages:
            self._return_stale(left)
            return False
        for place in range(before, after):
            slot = Slot()
            self.slots.append(slot)
            for life_cycle in range(len(store.windows)):
                if place >= store.stale_end(life_cycle, history):
                    self.give(slot, life_cycle)
        self.capacity, self.history = capacity, history
        for _, _, page in left:
            store.unhold(page)
        return True

    def _leave_stale(self, history: int) -> list[tuple[Slot, int, Page]]:
        """Unlock pages that leave their window; they are held until the resize has succeeded."""
        left: list[tuple[Slot, int, Page]] = []
        for life_cycle in range(len(self.store.windows)):
            ends = (self.store.stale_end(life_cycle, self.history), self.store.stale_end(life_cycle, history))
            for slot in self.slots[slice(*ends)]:
                if life_cycle not in slot.pages:
                    continue
                page = slot.pages[life_cycle]
                left.append((slot, life_cycle, page))
                page.holders += 1
                keep = not self.minimal and slot.node is None and self.is_committing
                if keep:
                    slot.locked[life_cycle] = False
                else:
                    del slot.pages[life_cycle], slot.locked[life_cycle]
                self.store.unlock(page, keep=keep)
        return left

    def _return_stale(self, left: list[tuple[Slot, int, Page]]) -> None:
        for slot, life_cycle, page in left:
            self.store.lock_all([page])
            page.holders -= 1 + (slot.locked.get(life_cycle) is False)
            slot.pages[life_cycle], slot.locked[life_cycle] = page, True

    def _pop(self) -> None:
        slot = self.slots[-1]
        for life_cycle in sorted(slot.pages, reverse=True):
            self.drop(slot, life_cycle)
        self.slots.pop()
        self._leave(slot)

    def close(self) -> None:
        """Stop committing and free everything, from the last block."""
        self.stop()
        while self.slots:
            self._pop()

    # ── Commit ──

    def commit(self, tokens: list[int]) -> None:
        self.tokens += tokens
        size = self.store.block_size
        if self.history < len(self.tokens):
            self.resize(history=len(self.tokens))
        for place in range(self.committed_blocks, len(self.tokens) // size):
            self._commit_block(place, is_last=False)
            if not self.is_committing:
                break
        if self.minimal and self.is_committing and len(self.tokens) % size:
            self._copy_end(len(self.tokens) // size)

    def stop(self) -> None:
        """Commit the incomplete last block, and commit no more."""
        if not self.is_committing:
            return
        if len(self.tokens) % self.store.block_size:
            self._commit_block(len(self.tokens) // self.store.block_size, is_last=True)
        else:
            self._end_commits()

    def _end_commits(self) -> None:
        self.is_committing = False
        for life_cycle in range(len(self.store.windows)):
            ends = (self.committed_blocks, self.store.stale_end(life_cycle, self.history))
            for slot in self.slots[slice(*ends)] if ends[0] < ends[1] else ():
                if life_cycle in slot.pages:
                    self.drop(slot, life_cycle)

    def _commit_block(self, place: int, *, is_last: bool) -> None:
        size = self.store.block_size
        tokens, slot = tuple(self.tokens[place * size : (place + 1) * size]), self.slots[place]
        node, is_new = self._find_node(place, tokens)
        if is_new:
            for life_cycle, page in sorted(slot.pages.items()):
                self._put(node, life_cycle, page, len(tokens))
                if page.is_listed and not self.store.may_evict(page):
                    self.store.delist(page)
        elif len(node.tokens) == len(tokens) == size:
            self._rebase(slot, node)
        else:
            self._end_commits()
            return
        slot.node = node
        node.users += 1
        self.committed_blocks = place + 1
        for life_cycle in sorted(slot.pages):
            if place < self.store.stale_end(life_cycle, self.history):
                self.drop(slot, life_cycle)
        if is_last:
            self._end_commits()

    def _rebase(self, slot: Slot, node: Block) -> None:
        """Use the pages that another request has committed, and drop our own."""
        others: list[tuple[int, Page]] = []
        for life_cycle in sorted(slot.pages):
            page = node.pages.get(life_cycle)
            if page is None or page.covered < len(node.tokens):
                self._put(node, life_cycle, slot.pages[life_cycle], len(node.tokens))
                continue
            if slot.locked[life_cycle]:
                slot.locked[life_cycle] = False
                self.store.unlock(slot.pages[life_cycle], keep=True)
            others.append((life_cycle, page))
        self.store.lock_all([page for _, page in others])
        for life_cycle, page in others:
            self.drop(slot, life_cycle)
            slot.pages[life_cycle], slot.locked[life_cycle] = page, True

    def _find_node(self, place: int, tokens: Tokens) -> tuple[Block, bool]:
        """Return the node of these tokens behind the block before, and whether it is new."""
        store = self.store
        if place == 0:
            parent: Block | None = store.roots.setdefault(self.scope, Block((), scope=self.scope))
        else:
            parent = self.slots[place - 1].node
        assert parent is not None
        there = parent.children.get(tokens)
        if there is None and len(tokens) < store.block_size:
            longer = (one for one in parent.children.values() if one.tokens[: len(tokens)] == tokens)
            there = next(longer, None)
        if there is not None:
            return there, False
        node = Block(tokens, parent)
        shorter = [one for key, one in parent.children.items() if tokens[: len(key)] == key]
        parent.children[tokens] = node
        for other in shorter:
            store.detach(other)
            for life_cycle, page in list(other.pages.items()):
                del other.pages[life_cycle]
                node.pages[life_cycle], page.block = page, node
            store.release(other)
        return node, True

    def _put(self, node: Block, life_cycle: int, page: Page, covered: int) -> None:
        """Make a page that of a node, in place of one that covers less."""
        old = node.pages.pop(life_cycle, None)
        if old is not None:
            old.block = None
            if old.is_listed:
                self.store.delist(old)
                if old.is_free_to_drop:
                    self.store.destroy(old)
        page.block, page.covered = node, covered
        node.pages[life_cycle] = page

    def _copy_end(self, place: int) -> None:
        """Copy the incomplete last block into the tree, below the device if there is no room."""
        store, tokens = self.store, tuple(self.tokens[place * self.store.block_size :])
        node, _ = self._find_node(place, tokens)
        for life_cycle, page in sorted(self.slots[place].pages.items()):
            there = node.pages.get(life_cycle)
            if there is not None and there.covered >= len(tokens):
                continue
            for level in range(page.level, store.last + 1):
                with suppress(OutOfPages):
                    if store.free[level] < 1:
                        store.make_room(level, 1, [])
                    store.free[level] -= 1
                    copy = Page(life_cycle, level)
                    names = ("device", "host")
                    store.copies.append((f"{names[page.level]}>{names[level]}", 1))
                    self._put(node, life_cycle, copy, len(tokens))
                    store.enlist(copy)
                    break
