"""The two sides of a disaggregated SGLang server, one at a time: docs/sglang.md, slow and literal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from model.sglang_scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.sglang_requests import Batch, Request
    from understudy.conformance.sglang_recording import SglangRequest, SglangScenarioConfig


@dataclass
class Link:
    """The other side of a request, in steps."""

    born: int
    handshake: int
    transfer: int
    fail_after: int | None
    decode_prefix: int
    begun: int | None = None
    reported: int | None = None
    ended: str | None = None

    def poll(self, now: int) -> str:
        if self.ended is None:
            if self.fail_after is not None and now >= self.born + self.fail_after:
                self.ended = "failed"
            elif now < self.born + self.handshake:
                return "boot"
            elif self.begun is None:
                return "ready"
            elif now < self.begun + self.transfer:
                return "moving"
            else:
                self.ended = "done"
        return self.ended


@dataclass
class SideLog:
    """Decisions of an iteration on one side."""

    sent: list[list[object]] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    allocated: list[list[object]] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)


class Side(Scheduler):
    """What both sides share."""

    def __init__(self, config: SglangScenarioConfig) -> None:
        super().__init__(config)
        self.step = 0
        self.links: dict[str, Link] = {}
        most = config.max_running_requests
        self.buffers = 2 * most if config.metadata_slots is None else config.metadata_slots
        self.queue: list[Request] = []
        self.moving: list[Request] = []
        self.held: list[Request] = []
        self.retracted: list[Request] = []
        self.side_log = SideLog()

    def receive(self, index: int, given: SglangRequest) -> None:
        c, request = self.c, self.make_request(index, given)
        handshake = c.handshake_steps if given.handshake_steps is None else given.handshake_steps
        transfer = c.transfer_steps if given.transfer_steps is None else given.transfer_steps
        self.links[given.id] = Link(self.step, handshake, transfer, given.fail_after, given.decode_prefix)
        if request.to_abort:
            self.end(request, failed=True)
        else:
            self.accept(request)

    def accept(self, request: Request) -> None:
        self.queue.append(request)

    def poll(self, request: Request) -> str:
        return self.links[request.name].poll(self.step)

    def end(self, request: Request, *, failed: bool) -> None:
        request.done = True
        self.log.finished.append(request.name)
        if failed:
            self.log.aborted.append(request.name)

    def enter(self, request: Request) -> None:
        self.entries += 1
        request.entry = self.entries

    def free_buffer(self, request: Request) -> None:
        self.buffers += request.has_buffer
        request.has_buffer = False

    def is_ending(self, request: Request) -> bool:
        return False

    def is_empty(self) -> bool:
        return super().is_empty() and not (self.queue or self.moving or self.held or self.retracted)


class PrefillSide(Side):
    """Prompts are computed and sent."""

    def accept(self, request: Request) -> None:
        request.max_new = 1
        super().accept(request)

    def abort(self, matches: Callable[[Request], bool]) -> None:
        for request in [one for one in self.waiting if matches(one)]:
            self.links[request.name].ended = "failed"
            self.free_buffer(request)
        super().abort(matches)
        for request in self.queue + self.moving:
            if matches(request):
                self.links[request.name].ended = "failed"

    def schedule(self) -> Batch | None:
        self.take_bootstrapped()
        if self.chunked is not None and self.chunk_aborted:
            self.free_buffer(self.chunked)
            self.release(self.chunked, inserts=False)
            self.end_aborted(self.chunked)
            self.chunked = None
        self.chunk_aborted = False
        for request in list(self.waiting):
            if self.poll(request) == "failed":
                self.waiting.remove(request)
                self.free_buffer(request)
                self.end(request, failed=True)
        if self.chunked is not None:
            self.keep(self.chunked)
            self.chunked.computed = self.chunked.end
            if not self.c.overlap:
                self.send(self.chunked, self.chunked.end, last=False)
        self.full = False
        batch = self.form_prefill()
        for request in batch.requests() if batch is not None and self.c.early_send else []:
            if request.prefix > request.sent:
                self.send(request, request.prefix, last=False)
        self.last = batch
        return batch

    def take_bootstrapped(self) -> None:
        for request in list(self.queue):
            state = self.poll(request)
            if state == "failed":
                self.queue.remove(request)
                self.end(request, failed=True)
            elif state == "ready" and self.buffers > 0:
                self.queue.remove(request)
                self.buffers -= 1
                request.has_buffer = True
                request.sent = self.links[request.name].decode_prefix
                self.enter(request)
                self.waiting.append(request)

    def send(self, request: Request, end: int, *, last: bool) -> None:
        end = min(end, len(request.prompt))
        if not last:
            end = self.down(end)
        if end < request.sent:
            return
        pages = self.up(end - request.sent) // self.page
        if pages > 0 or last:
            self.side_log.sent.append([request.name, pages, last])
        request.sent = end

    def process(self, batch: Batch) -> None:
        failed = []
        for request in batch.requests():
            if request.chunks > 0:
                request.chunks -= 1
                if not request.done and not request.to_abort and self.c.overlap:
                    self.send(request, request.computed, last=False)
            elif request.to_abort and not request.done:
                request.done = True
                self.free_buffer(request)
                self.release(request, inserts=False)
                failed.append(request)
            elif not request.done:
                request.append()
                self.keep(request)
                self.moving.append(request)
                self.send(request, len(request.prompt), last=True)
                self.links[request.name].begun = self.step
        for request in failed:
            self.end(request, failed=True)

    def end_iteration(self, *, idle: bool) -> None:
        super().end_iteration(idle=idle)
        states = [(request, self.poll(request)) for request in self.moving]
        ended = [(request, state) for request, state in states if state in ("done", "failed")]
        self.moving = [request for request, state in states if state not in ("done", "failed")]
        for request, _ in ended:
            self.release(request, inserts=True)
        for request, state in ended:
            self.end(request, failed=state == "failed")
            self.free_buffer(request)


class DecodeSide(Side):
    """Memory is allocated for prompts that the other side computes."""

    def __init__(self, config: SglangScenarioConfig) -> None:
        super().__init__(config)
        most = config.max_running_requests
        extra = 2 * most if most <= 32 else 0
        self.slots += extra if config.extra_slots is None else config.extra_slots
        self.polls = 0
        self.host = config.host_tokens

    def abort(self, matches: Callable[[Request], bool]) -> None:
        waiting = [one for one in reversed(self.waiting) if matches(one)]
        super().abort(matches)
        for request in waiting:
            self.release(request, inserts=True)
        for request in self.queue + self.moving:
            if matches(request):
                link = self.links[request.name]
                link.ended = "failed"
                link.reported = self.step if link.reported is None else link.reported
        for request in [one for one in self.retracted if matches(one)]:
            self.retracted.remove(request)
            self.host = None if self.host is None else self.host + self.copied(request)
            self.end_aborted(request)

    def copied(self, request: Request) -> int:
        return self.up(len(request.tokens()) - 1)

    def filled(self, request: Request) -> int:
        return len(request.prompt) + max(len(request.out) - 1, 0)

    def budget(self, retractable: int | None, more: int) -> int:
        active = len(self.running) + len(self.moving) + len(self.waiting) + more
        reserved = [self.c.num_reserved_decode_tokens * active]
        if retractable is not None:
            reserved += [self.clip(one.max_new) + len(one.prompt) - retractable for one in self.running]
        return self.pool() - max(reserved)

    def preallocate(self, request: Request, prefix: int) -> None:
        filled = self.filled(request)
        self.slots -= 1
        request.has_slot = True
        self.room(self.up(filled) - self.up(prefix))
        self.take(self.up(filled) - self.up(prefix))
        request.kv = request.end = filled
        request.prefix = request.own = prefix

    def schedule(self) -> Batch | None:
        self.free_held()
        self.resume()
        if not self.retracted:
            self.polls = (self.polls + 1) % self.c.polling_interval
            if self.polls == 0:
                self.allocate_pages()
                self.take_arrived()
        self.join()
        self.last = self.form_decode() if self.running else None
        return self.last

    def free_held(self) -> None:
        for request in list(self.held):
            reported = self.links[request.name].reported
            assert reported is not None
            assert self.c.ack_steps is not None
            if self.step >= reported + self.c.ack_steps:
                self.held.remove(request)
                self.release(request, inserts=False)
                self.free_buffer(request)

    def resume(self) -> None:
        resumed: list[Request] = []
        for request in list(self.retracted):
            needed = self.up(self.filled(request)) + self.c.num_reserved_decode_tokens
            if self.slots <= 0 or needed > self.budget(None, len(resumed)):
                break
            self.retracted.remove(request)
            self.host = None if self.host is None else self.host + self.copied(request)
            self.preallocate(request, 0)
            request.withdrawn = False
            resumed.append(request)
        self.waiting += resumed
        self.side_log.resumed += [request.name for request in resumed]

    def allocate_pages(self) -> None:
        for request in self.queue:
            request.ready = request.ready or self.poll(request) == "ready"
        failed = [request for request in self.queue if self.poll(request) == "failed"]
        if self.c.enable_priority_scheduling:
            self.queue.sort(key=lambda one: one.priority * self.sign)
        for request in [one for one in self.queue if one in failed]:
            self.end(request, failed=True)
        self.queue = [request for request in self.queue if request not in failed]
        retractable = sum(len(one.tokens()) for one in self.running)
        allocated: list[Request] = []
        for request in list(self.queue):
            if not request.ready:
                continue
            if self.buffers <= 0 or self.slots <= 0:
                break
            length, prefix, lock = len(request.prompt), 0, None
            if self.cache:
                prefix, node = self.tree.match(request.prompt)
                lock = self.tree.lock(node)
            pages = self.up(length) - self.up(prefix)
            needed = max(
                pages + self.c.num_reserved_decode_tokens,
                length - prefix + self.clip(request.max_new) - retractable,
            )
            if needed > self.budget(retractable, len(allocated)):
                if lock is not None:
                    self.tree.unlock(lock)
                break
            self.queue.remove(request)
            self.preallocate(request, prefix)
            request.lock, request.has_buffer = lock, True
            self.buffers -= 1
            self.links[request.name].begun = self.step
            allocated.append(request)
            self.side_log.allocated.append([request.name, -(-(length - prefix) // self.page), prefix])
        self.moving += allocated

    def take_arrived(self) -> None:
        failed = []
        for request in list(self.moving):
            state, link = self.poll(request), self.links[request.name]
            if state not in ("done", "failed"):
                continue
            self.moving.remove(request)
            if state == "failed":
                self.end(request, failed=True)
                link.reported = self.step if link.reported is None else link.reported
                failed.append(request)
            else:
                request.append()
                self.enter(request)
                self.free_buffer(request)
                self.waiting.append(request)
                self.side_log.arrived.append(request.name)
        for request in failed:
            if self.c.ack_steps is not None:
                self.held.append(request)
            else:
                self.release(request, inserts=False)
                self.free_buffer(request)

    def join(self) -> None:
        c = self.c
        if c.enable_priority_scheduling and c.schedule_policy == "lof":
            self.waiting.sort(key=lambda one: (one.priority * self.sign, -one.max_new))
        elif c.enable_priority_scheduling:
            self.waiting.sort(key=lambda one: (one.priority * self.sign, one.entry))
        places = max(0, c.max_running_requests - len(self.running))
        joined, self.waiting = self.waiting[:places], self.waiting[places:]
        for request in joined:
            self.keep(request)
        self.side_log.joined += [request.name for request in joined]
        for request in joined:
            if self.has_ended(request):
                self.release(request, inserts=True)
                self.end(request, failed=request.to_abort)
        self.running = self.running + [request for request in joined if not request.done]

    def keeps(self, request: Request) -> bool:
        if self.c.retraction_backup == "none":
            return False
        if self.host is not None:
            if self.host < self.copied(request):
                return False
            self.host -= self.copied(request)
        return True

    def put_back(self, request: Request) -> None:
        self.enter(request)
        self.retracted.append(request)
