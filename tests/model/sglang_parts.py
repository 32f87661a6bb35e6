"""Windows and states in SGLang's radix tree: which nodes have them, what a match needs, locks and evictions."""

from __future__ import annotations

from model.sglang_tree import Insert, Lock, Node, Tree


class PartTree(Tree):
    """A tree whose nodes may have a part in a second pool; `order` has those that do, the last used first."""

    def __init__(self, page: int, eviction: str, avail: int, free: int, *, has_events: bool) -> None:
        super().__init__(page, eviction, avail, has_events=has_events)
        self.free = free
        self.order: list[Node] = []

    def weight(self, node: Node) -> int:
        raise NotImplementedError

    def sums(self) -> tuple[int, int]:
        """Return what is evictable and what is locked in the second pool."""
        locked = sum(self.weight(node) for node in self.order if node.part_locks > 0)
        return sum(map(self.weight, self.order)) - locked, locked

    def give(self, node: Node) -> None:
        assert not node.part
        node.part = True
        self.order.insert(0, node)

    def drop(self, node: Node) -> None:
        node.part = False
        self.order.remove(node)
        self.free += self.weight(node)

    def remove(self, node: Node) -> None:
        if node.part:
            self.drop(node)
        super().remove(node)

    def to_front(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.order.remove(node)
        self.order[:0] = nodes

    def evict_parts(self, target: int) -> None:
        """Evict parts from the old end until so much is free: leaves as a whole, other nodes' parts alone."""
        for node in [one for one in reversed(self.order) if one.part_locks == 0]:
            if self.free >= target:
                return
            if self.is_leaf(node):
                self.remove(node)
            else:
                self.drop(node)

    def unlock_part(self, lock: Lock) -> None:
        raise NotImplementedError

    def unlock(self, lock: Lock) -> None:
        if not lock.part_unlocked:
            self.unlock_part(lock)
        super().unlock(lock)

    def head(self) -> list[list[int]]:
        return [self.place(node) for node in [one for one in reversed(self.order) if one.part_locks == 0][:4]]


class WindowTree(PartTree):
    """Nodes with window KV; one without is a tombstone."""

    def __init__(
        self, page: int, eviction: str, avail: int, free: int, window: int, *, has_events: bool
    ) -> None:
        super().__init__(page, eviction, avail, free, has_events=has_events)
        self.window = window
        self.marks = 0

    def weight(self, node: Node) -> int:
        return len(node.key)

    def on_split(self, upper: Node, lower: Node) -> None:
        upper.part, upper.part_locks = lower.part, lower.part_locks
        upper.mark, lower.mark = lower.mark, 0
        if upper.part:
            self.order.insert(self.order.index(lower) + 1, upper)

    def matched(self, walked: list[Node]) -> Node:
        end, behind = self.root, float("inf")
        for node in walked:
            behind = behind + len(node.key) if node.part else 0
            if node.part and behind >= self.window:
                end = node
        self.refresh(end)
        reached = sum(len(node.key) for node in walked)
        self.branch = reached if reached > end.start() + len(end.key) else None
        return end

    def refresh(self, end: Node) -> None:
        """Make the window up from a node the last used one."""
        passed, used = 0, []
        for node in end.up():
            if passed >= self.window + self.page:
                break
            if node.part:
                used.append(node)
            passed += len(node.key)
        self.to_front(used)

    def on_covered(self, node: Node, start: int, end: int, own: int, window_begin: int, out: Insert) -> None:
        live = max(start, window_begin)
        if own < end and not node.part and live < end:
            if live > start:
                self.split(node, live - start)
            out.freed += end - live
            self.give(node)
            end = live
        begin = max(own, start)
        if begin < end:
            out.freed += end - begin
            out.freed_window += sum(token >= window_begin for token in range(begin, end))

    def on_leaf(self, leaf: Node, window_begin: int) -> None:
        start = leaf.start()
        if window_begin >= start + len(leaf.key):
            return
        if window_begin > start:
            self.split(leaf, window_begin - start)
        tail = -(-self.window // self.page) * self.page
        if len(leaf.key) > tail:
            self.give(self.split(leaf, len(leaf.key) - tail))
        self.give(leaf)

    def on_inserted(self, out: Insert, *, is_leaf: bool) -> None:
        self.refresh(out.node)

    def lock(self, node: Node) -> Lock:
        lock, covered = super().lock(node), 0
        for each in node.up():
            if covered >= self.window:
                break
            each.part_locks += 1
            covered += len(each.key)
            if covered >= self.window:
                if each.mark == 0:
                    self.marks += 1
                    each.mark = self.marks
                lock.mark = each.mark
        return lock

    def unlock_part(self, lock: Lock) -> None:
        for each in lock.node.up():
            each.part_locks -= 1
            assert each.part_locks >= 0
            if lock.mark and each.mark == lock.mark:
                break

    def release_window(self, lock: Lock) -> None:
        """Unlock the window alone, if the lock has an end."""
        if lock.mark and not lock.part_unlocked:
            self.unlock_part(lock)
            lock.part_unlocked = True

    def make_room(self, tokens: int) -> None:
        short = self.free < tokens
        super().make_room(tokens)
        if short:
            self.evict_parts(tokens)


class StateTree(PartTree):
    """Nodes with the state after their last token."""

    def __init__(
        self, page: int, eviction: str, avail: int, free: int, grid: int, most: int, *, has_events: bool
    ) -> None:
        super().__init__(page, eviction, avail, free, has_events=has_events)
        self.grid, self.most = grid, most

    def weight(self, node: Node) -> int:
        return 1

    def matched(self, walked: list[Node]) -> Node:
        end = next((node for node in reversed(walked) if node.part), self.root)
        if end.part:
            self.to_front([end])
        reached = sum(len(node.key) for node in walked) // self.grid * self.grid
        self.branch = reached if reached > end.start() + len(end.key) else None
        return end

    def on_inserted(self, out: Insert, *, is_leaf: bool) -> None:
        node = out.node
        out.part_exists = node.part
        if node.part:
            self.to_front([node])
        else:
            self.give(node)
        if not is_leaf:
            node.used = self.tick()
        if not out.part_exists:
            self.cap_path(node)

    def cap_path(self, end: Node) -> None:
        """Drop states of a path that has too many, the shallowest first."""
        states = [node for node in end.up() if node.part]
        over = len(states) - self.most if self.most >= 0 else 0
        for node in reversed(states[1:]):
            if over > 0 and node.part_locks == 0 and len(node.children) == 1:
                self.drop(node)
                over -= 1

    def lock(self, node: Node) -> Lock:
        lock = super().lock(node)
        if node is not self.root:
            node.part_locks += 1
        return lock

    def unlock_part(self, lock: Lock) -> None:
        if lock.node is not self.root:
            lock.node.part_locks -= 1

    def release_state(self, lock: Lock) -> None:
        """Unlock the state alone."""
        if not lock.part_unlocked:
            self.unlock_part(lock)
            lock.part_unlocked = True
