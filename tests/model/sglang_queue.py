"""The order of the waiting queue, in the model of SGLang's scheduler."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from model.sglang_base import Base

if TYPE_CHECKING:
    from model.sglang_requests import Request
    from model.sglang_tree import Node


class Queue(Base):
    """Orders waiting requests."""

    def order_queue(self) -> None:
        c, queue = self.c, self.waiting
        if c.enable_priority_scheduling and c.schedule_policy == "lof":
            queue.sort(key=lambda one: (one.priority * self.sign, -one.max_new))
        elif c.enable_priority_scheduling:
            queue.sort(key=lambda one: (one.priority * self.sign, one.entry))
        elif c.schedule_policy == "lof":
            queue.sort(key=lambda one: -one.max_new)
        elif self.cache and c.schedule_policy == "dfs-weight":
            self.order_by_weight()
            return
        elif self.cache and c.schedule_policy == "lpm" and len(queue) <= 128:
            self.order_by_prefix()
            return
        if c.radix_eviction_policy == "lru" and self.cache and queue:
            self.passes += 1
            if self.passes % 32 == 1:
                for request in reversed(queue[:128]):
                    self.match_whole(request)

    def match_whole(self, request: Request) -> tuple[int, Node]:
        tokens = request.tokens()
        found, node = self.tree.match(tokens)
        request.matched = (len(tokens), found)
        return found, node

    def order_by_prefix(self) -> None:
        noted: list[list[int]] = []
        keys: dict[int, tuple[int, int]] = {}
        for request in self.waiting:
            found, _ = self.match_whole(request)
            tokens = request.tokens()
            late = False
            if found <= self.c.in_batch_check_threshold:
                shared = max((self.equal(tokens, one) for one in noted), default=0)
                late = shared >= self.c.in_batch_deprioritize_threshold
                if not late:
                    noted.append(tokens)
            keys[id(request)] = (1, 0) if late else (0, -min(found, len(tokens) - 1))
        self.waiting.sort(key=lambda one: keys[id(one)])

    def equal(self, left: list[int], right: list[int]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))

    def order_by_weight(self) -> None:
        at: dict[int, list[Request]] = {}
        for request in list(self.waiting):
            at.setdefault(id(self.match_whole(request)[1]), []).append(request)
        weights: dict[int, int] = {}

        def weigh(node: Node) -> int:
            children = node.children.values()
            weights[id(node)] = len(at.get(id(node), ())) + sum(weigh(child) for child in children)
            return weights[id(node)]

        def visit(node: Node) -> list[Request]:
            children = sorted(node.children.values(), key=lambda child: -weights[id(child)])
            return [one for child in children for one in visit(child)] + at.get(id(node), [])

        weigh(self.tree.root)
        self.waiting = visit(self.tree.root)
