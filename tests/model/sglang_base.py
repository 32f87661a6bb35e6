"""State of the model of SGLang's scheduler: what it receives, its memory, and results of batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model.sglang_requests import EOS, Request
from model.sglang_tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.sglang_requests import Batch, Row
    from understudy.conformance.sglang_recording import SglangRequest, SglangScenarioConfig

WORST = 2**62


class OutOfMemoryError(Exception):
    """SGLang would exit."""


@dataclass
class Log:
    """Decisions of an iteration."""

    new: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    retracted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)


class Base:
    """One worker, without the decisions of a schedule."""

    def __init__(self, config: SglangScenarioConfig) -> None:
        self.c = c = config
        self.page = c.page_size
        self.cache = not c.disable_radix_cache
        self.tree = self.make_tree()
        self.slots = c.max_running_requests
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.full = False
        self.prefill_only = False
        self.last: Batch | None = None
        self.outstanding: Batch | None = None
        self.chunked: Request | None = None
        self.chunk_aborted = False
        self.init_ratio = min(c.init_new_token_ratio * c.schedule_conservativeness, 1.0)
        self.min_ratio = min(self.init_ratio * c.min_new_token_ratio_factor, 1.0)
        self.ratio = self.init_ratio
        self.sign = 1 if c.schedule_low_priority_values_first else -1
        self.preempts = c.enable_priority_scheduling and not c.disable_priority_preemption
        self.entries = self.passes = self.interval = 0
        self.requeue: list[Request] = []
        self.log = Log()

    def make_tree(self) -> Tree:
        events = self.c.kv_events and self.cache
        return Tree(self.page, self.c.radix_eviction_policy, self.c.max_total_num_tokens, has_events=events)

    def up(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def down(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def clip(self, tokens: int) -> int:
        return min(tokens, self.c.clip_max_new_tokens)

    def room(self, tokens: int) -> None:
        if self.cache:
            self.tree.make_room(tokens)

    def free(self) -> int:
        return self.tree.avail

    def take(self, tokens: int) -> None:
        if tokens > self.free():
            raise OutOfMemoryError
        self.tree.avail -= tokens

    def pool(self) -> int:
        return self.tree.avail + (self.tree.evictable if self.cache else 0)

    def make_request(self, index: int, given: SglangRequest) -> Request:
        c, length = self.c, sum(count for _, count in given.runs())
        limit = min(c.context_len, c.max_total_num_tokens) - 1
        most = min(limit - length - 1, c.max_total_num_tokens - self.up(length) - self.page - 1)
        prompt = [token for first, count in given.runs() for token in range(first, first + count)]
        priority = self.sign * WORST if given.priority is None else given.priority
        max_new = max(0, min(given.max_tokens, most))
        request = Request(given.id, index, prompt, max_new, given.eos_at, priority)
        if length >= limit - 5:
            request.prompt, request.to_abort = [0], True
        return request

    def receive(self, index: int, given: SglangRequest) -> None:
        self.enqueue(self.make_request(index, given))

    def enqueue(self, request: Request) -> None:
        self.entries += 1
        request.entry = self.entries
        limit = self.c.max_queued_requests
        if limit is not None and len(self.waiting) + 1 > limit:
            victim = request
            if self.c.enable_priority_scheduling and self.waiting:
                worst = max(self.waiting, key=lambda one: (one.priority * self.sign, one.entry))
                if request.priority * self.sign < worst.priority * self.sign:
                    self.waiting.remove(worst)
                    victim = worst
            self.end_aborted(victim)
            if victim is request:
                return
        self.waiting.append(request)

    def end_aborted(self, request: Request) -> None:
        request.done = True
        self.log.aborted.append(request.name)

    def abort(self, matches: Callable[[Request], bool]) -> None:
        if self.chunked is not None and matches(self.chunked):
            self.chunk_aborted = True
        for request in [one for one in reversed(self.waiting) if matches(one)]:
            self.waiting.remove(request)
            self.end_aborted(request)
        for request in self.running + (self.last.requests() if self.last else []):
            if not request.done and matches(request):
                request.to_abort = True

    def need(self, requests: list[Request]) -> int:
        return sum(self.page for one in requests if one.kv % self.page == 0)

    def fits(self, requests: list[Request]) -> bool:
        self.room(self.need(requests))
        return self.free() >= self.need(requests)

    def grow(self) -> None:
        """Allocate for a decode of the running requests."""
        self.room(self.page * len(self.running))
        self.take(self.need(self.running))
        for request in self.running:
            request.kv += 1

    def drop_ending(self) -> tuple[bool, bool]:
        """Drop ended requests, and with overlap those whose outstanding output is their last by length."""
        before = len(self.running)
        self.running = [one for one in self.running if not one.done]
        ending = [one for one in self.running if self.is_ending(one)]
        self.running = [one for one in self.running if one not in ending]
        return len(self.running) < before, bool(ending)

    def is_ending(self, request: Request) -> bool:
        if self.outstanding is None or request is self.outstanding.unfinished:
            return False
        return request in self.outstanding.requests() and len(request.out) + 1 >= request.max_new

    def process(self, batch: Batch) -> None:
        for row in batch.rows:
            request = row.request
            prefill = batch.mode != "decode"
            if request.withdrawn or (request.done and not (prefill and request.chunks > 0)):
                continue
            if prefill and request.chunks > 0:
                request.chunks -= 1
                continue
            if not prefill:
                self.before_output(row)
            request.append()
            if self.has_ended(request):
                request.done = True
                self.log.finished.append(request.name)
                if request.to_abort:
                    self.log.aborted.append(request.name)
                self.release(request, inserts=True)
            elif prefill and not row.decodes:
                self.keep(request)

    def before_output(self, row: Row) -> None:
        """See a decoded row before its output is there."""

    def has_ended(self, request: Request) -> bool:
        eos = request.out[-1] == EOS and not self.c.ignore_eos
        return request.to_abort or eos or len(request.out) >= request.max_new

    def keep(self, request: Request) -> None:
        if self.cache:
            self.checkpoint(request, request.end, ends=False)
        request.prefix = request.end

    def checkpoint(self, request: Request, count: int, *, ends: bool) -> None:
        tokens = request.tokens()
        whole = self.down(count)
        done = self.tree.insert(tokens[:whole], request.own, request.inserted)
        self.tree.avail += done.freed
        request.inserted = max(request.inserted, whole)
        prompt = self.down(len(request.prompt))
        if 0 < prompt < whole:
            self.tree.insert(tokens[:prompt], prompt, prompt)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        request.lock = self.tree.lock(done.node)
        request.own = whole

    def release(self, request: Request, *, inserts: bool) -> None:
        if inserts and self.cache:
            self.checkpoint(request, request.kv, ends=True)
        self.tree.avail += self.up(request.kv) - request.own
        if request.lock is not None:
            self.tree.unlock(request.lock)
        request.lock = None
        if request.has_slot:
            self.slots += 1
        request.has_slot = False
