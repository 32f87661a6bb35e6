"""SGLang's radix tree, token by token: what docs/sglang.md says of it, slow and literal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """A run of whole pages; the root has none."""

    key: Tokens
    parent: Node | None
    used: float
    born: float
    children: dict[Tokens, Node] = field(default_factory=dict)
    locks: int = 0
    hits: int = 0
    pages: list[int] = field(default_factory=list)
    """Numbers of its pages, equal for equal prefixes."""

    # With windows or states.
    part: bool = False
    part_locks: int = 0
    mark: int = 0

    def start(self) -> int:
        """Return the position of its first token."""
        return 0 if self.parent is None else self.parent.start() + len(self.parent.key)

    def up(self) -> list[Node]:
        """Return the node and its ancestors without the root, lowest first."""
        return [] if self.parent is None else [self, *self.parent.up()]


@dataclass
class Lock:
    """A locked node; `mark` names the end of its locked window."""

    node: Node
    mark: int = 0
    part_unlocked: bool = False


@dataclass
class Insert:
    """What an insert did: where it ended, and how many tokens of the request it freed."""

    node: Node
    freed: int = 0
    freed_window: int = 0
    part_exists: bool = True


class Tree:
    """The tree with full KV; `avail` is the pool that it shares with the scheduler."""

    def __init__(self, page: int, eviction: str, avail: int, *, has_events: bool) -> None:
        self.page, self.eviction, self.has_events = page, eviction, has_events
        self.avail = avail
        self.clock = 0.0
        self.root = Node((), None, 0, 0)
        self.branch: int | None = None
        self._chain: dict[tuple[int, Tokens], int] = {}
        self._numbers: dict[int, int] = {}
        self._events: list[dict[str, Any]] = []
        self.evictable = self.protected = 0

    # -- time, places, sizes
    def tick(self) -> float:
        self.clock += 1
        return self.clock

    def rank(self, node: Node) -> tuple[float, float]:
        return {
            "lru": (node.used, 0.0),
            "lfu": (node.hits, node.used),
            "slru": (float(node.hits >= 2), node.used),
            "fifo": (node.born, node.used),
            "filo": (-node.born, node.used),
            "mru": (-node.used, 0.0),
        }[self.eviction]

    def nodes(self) -> list[Node]:
        found: list[Node] = []
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return found

    def leaves(self) -> list[Node]:
        unlocked = [node for node in self.nodes() if not node.children and node.locks == 0]
        return sorted(unlocked, key=self.rank)

    def place(self, node: Node) -> list[int]:
        return [node.start(), len(node.key), node.key[-1]]

    def is_leaf(self, node: Node) -> bool:
        return not node.children and node.locks == 0

    # -- walks
    def common(self, left: Tokens, right: Tokens) -> int:
        """Return the equal leading tokens, in whole pages."""
        equal = 0
        for one, other in zip(left, right, strict=False):
            if one != other:
                break
            equal += 1
        return equal - equal % self.page

    def split(self, lower: Node, at: int) -> Node:
        """Split a node; the upper part is new and returned."""
        assert lower.parent is not None
        upper = Node(
            lower.key[:at], lower.parent, self.tick(), lower.born, hits=lower.hits, locks=lower.locks
        )
        upper.pages, lower.pages = lower.pages[: at // self.page], lower.pages[at // self.page :]
        lower.parent.children[upper.key[: self.page]] = upper
        lower.key, lower.parent = lower.key[at:], upper
        upper.children[lower.key[: self.page]] = lower
        self.on_split(upper, lower)
        lower.used = self.tick()
        return upper

    def on_split(self, upper: Node, lower: Node) -> None:
        """Divide what the components have."""

    def walk(self, tokens: list[int]) -> list[Node]:
        """Return the nodes that hold the leading pages, the last one split where they end."""
        key = tuple(tokens[: len(tokens) // self.page * self.page])
        node, found, at = self.root, [], 0
        while at < len(key) and (child := node.children.get(key[at : at + self.page])) is not None:
            equal = self.common(child.key, key[at:])
            whole = equal == len(child.key)
            node = child if whole else self.split(child, equal)
            found.append(node)
            at += equal
            if not whole:
                break
        return found

    def match(self, tokens: list[int]) -> tuple[int, Node]:
        """Return the cached prefix and the node where it ends; refreshes their times."""
        self.branch = None
        if len(tokens) < self.page:
            return 0, self.root
        end = self.matched(self.walk(tokens))
        now = self.tick()
        for place, node in enumerate(end.up()):
            node.used = now - place * 0.00001
        return end.start() + len(end.key), end

    def matched(self, walked: list[Node]) -> Node:
        """Return the node where a match ends."""
        return walked[-1] if walked else self.root

    def insert(self, tokens: list[int], own: int, counted: int, window_begin: int = 0) -> Insert:
        """Insert whole pages, of which `own` tokens are the tree's; hits count beyond `counted`."""
        key = tuple(tokens)
        out = Insert(self.root)
        node, at = self.root, 0
        while at < len(key) and (child := node.children.get(key[at : at + self.page])) is not None:
            child.used = self.tick()
            equal = self.common(child.key, key[at:])
            node = child if equal == len(child.key) else self.split(child, equal)
            self.on_covered(node, at, at + equal, own, window_begin, out)
            if at + equal > counted:
                node.hits += 1
            at += equal
        is_leaf = at < len(key)
        if is_leaf:
            node = self.add_leaf(node, key, at)
            self.on_leaf(node, window_begin)
            if len(key) > counted:
                node.hits += 1
        out.node = node
        if key:
            self.on_inserted(out, is_leaf=is_leaf)
        return out

    def on_covered(self, node: Node, start: int, end: int, own: int, window_begin: int, out: Insert) -> None:
        """Free the request's copies of tokens that the tree has."""
        out.freed += max(0, end - max(own, start))

    def on_leaf(self, leaf: Node, window_begin: int) -> None:
        """Give a new leaf what the components have."""

    def on_inserted(self, out: Insert, *, is_leaf: bool) -> None:
        """Refresh components where an insert ended."""

    def add_leaf(self, parent: Node, key: Tokens, at: int) -> Node:
        leaf = Node(key[at:], parent, self.tick(), self.tick())
        before = parent.pages[-1] if parent.pages else -1
        for start in range(at, len(key), self.page):
            page = key[start : start + self.page]
            before = self._chain.setdefault((before, page), len(self._chain))
            leaf.pages.append(before)
        parent.children[leaf.key[: self.page]] = leaf
        self.evictable += len(leaf.key)
        self._store(parent, leaf, at)
        return leaf

    # -- locks
    def lock(self, node: Node) -> Lock:
        for each in node.up():
            if each.locks == 0:
                self.evictable -= len(each.key)
                self.protected += len(each.key)
            each.locks += 1
        return Lock(node)

    def unlock(self, lock: Lock) -> None:
        for each in lock.node.up():
            each.locks -= 1
            assert each.locks >= 0
            if each.locks == 0:
                self.evictable += len(each.key)
                self.protected -= len(each.key)

    # -- eviction
    def make_room(self, tokens: int) -> None:
        """Evict leaves until so many tokens are free, or none is left."""
        while self.avail < tokens and (leaves := self.leaves()):
            self.remove(leaves[0])

    def remove(self, node: Node) -> None:
        assert node.parent is not None
        if self.has_events:
            numbers = [self._number(page) for page in node.pages]
            if self._events and self._events[-1]["type"] == "removed":
                self._events[-1]["h"] += numbers
            else:
                self._events.append({"type": "removed", "h": numbers})
        self.evictable -= len(node.key)
        self.avail += len(node.key)
        del node.parent.children[node.key[: self.page]]

    # -- events
    def _number(self, page: int) -> int:
        return self._numbers.setdefault(page, len(self._numbers))

    def _store(self, parent: Node, leaf: Node, at: int) -> None:
        if not self.has_events:
            return
        before = self._number(parent.pages[-1]) if parent.pages else None
        numbers = [self._number(page) for page in leaf.pages]
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "stored" and before is not None and last["h"][-1] == before:
            last["h"] += numbers
            last["last"] = leaf.key[-1]
            return
        event = {"type": "stored", "h": numbers, "parent": before, "pos": at}
        self._events.append({**event, "first": leaf.key[0], "last": leaf.key[-1]})

    def take_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        lines = []
        for event in events:
            runs: list[list[int]] = []
            for number in event["h"]:
                if runs and sum(runs[-1]) == number:
                    runs[-1][1] += 1
                else:
                    runs.append([number, 1])
            rest = {key: value for key, value in event.items() if key not in ("type", "h")}
            lines.append({"type": event["type"], "n": len(event["h"]), "h": runs, **rest})
        return lines
