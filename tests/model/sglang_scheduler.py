"""SGLang's scheduler with full attention and without a host tier: docs/sglang.md, slow and literal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.sglang_prefill import Prefill
from model.sglang_requests import Batch, Row

if TYPE_CHECKING:
    from model.sglang_requests import Request


class Scheduler(Prefill):
    """One worker. An iteration is receive, schedule, process."""

    def schedule(self) -> Batch | None:
        if self.chunked is not None and self.chunk_aborted:
            self.release(self.chunked, inserts=False)
            self.end_aborted(self.chunked)
            self.chunked = None
        self.chunk_aborted = False
        if self.chunked is not None and self.chunked.end > self.chunked.prefix:
            self.keep(self.chunked)
        self.take_over_last()
        if any(request.done for request in self.running):
            self.running = [request for request in self.running if not request.done]
            self.full = False
        batch = None if self.deferred() else self.form_prefill()
        if batch is not None:
            self.interval = self.c.prefill_decode_interval
        elif self.running and not self.prefill_only:
            batch = self.form_decode()
        self.last = batch
        return batch

    def deferred(self) -> bool:
        if self.interval > 0 and len(self.running) < self.c.prefill_decode_interval_min_bs:
            self.interval = 0
        if self.interval > 0:
            self.interval -= 1
            return True
        return False

    def take_over_last(self) -> None:
        last = self.last
        if last is None or last.mode == "decode":
            return
        out = (self.chunked, last.unfinished)
        left = [one for one in last.requests() if not one.done and one not in out]
        if len(left) < len(last.rows):
            self.full = False
        if not left:
            return
        only = last.mode == "extend" and all(one.max_new == 0 for one in last.requests())
        if not self.running:
            self.full = False
        self.prefill_only = only and (not self.running or self.prefill_only)
        self.running = self.running + left

    def form_decode(self) -> Batch | None:
        fewer, dropped = self.drop_ending()
        if not self.running:
            self.full = False
            return None
        if self.fits(self.running):
            step = (self.init_ratio - self.min_ratio) / self.c.new_token_ratio_decay_steps
            self.ratio = max(self.ratio - step, self.min_ratio)
        elif dropped:
            self.full = False
            return None
        else:
            self.retract()
            fewer = True
        if fewer:
            self.full = False
        if not self.running:
            return None
        self.grow()
        return Batch("decode", [Row(one, 1, decodes=True, kv=one.kv) for one in self.running])

    def retract(self) -> None:
        by_priority = self.c.retraction_policy == "priority"
        self.running.sort(
            key=lambda one: (one.priority * self.sign if by_priority else 0, -len(one.out), len(one.prompt))
        )
        victims: list[Request] = []
        lost: list[Request] = []
        while len(self.running) > 1 and (not victims + lost or not self.fits(self.running)):
            victim = self.running.pop()
            (victims if self.keeps(victim) else lost).append(victim)
            self.release(victim, inserts=False)
            self.room(len(self.running) * self.c.retract_decode_steps)
            victim.forget()
        if len(self.running) == 1 and not self.fits(self.running):
            lost.append(self.running.pop())
            self.release(lost[-1], inserts=False)
            lost[-1].forget()
        outputs = sum(len(one.out) + self.c.retract_decode_steps for one in self.running)
        self.ratio = min(1.0, outputs / (sum(one.max_new for one in self.running) + 1))
        for one in lost:
            self.end_aborted(one)
        self.log.retracted += [one.name for one in victims]
        for one in victims:
            self.put_back(one)

    def keeps(self, request: Request) -> bool:
        """Whether a retracted request stays here."""
        return True

    def put_back(self, request: Request) -> None:
        self.enqueue(request)

    def end_iteration(self, *, idle: bool) -> None:
        if idle and self.is_empty():
            self.ratio = self.init_ratio

    def is_empty(self) -> bool:
        last = self.last.requests() if self.last else []
        busy = self.waiting or self.running or self.chunked is not None
        return not busy and all(request.done for request in last)
