"""Prefill batches, in the model of SGLang's scheduler."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from model.sglang_queue import Queue
from model.sglang_requests import Batch, Budget, Row

if TYPE_CHECKING:
    from model.sglang_requests import Request
    from model.sglang_tree import Node


class Prefill(Queue):
    """Forms prefill batches."""

    def mixes(self) -> bool:
        return self.c.enable_mixed_chunk and self.c.chunked_prefill_size > 0

    def share(self, request: Request) -> float:
        return self.clip(request.max_new - len(request.out)) * (1.0 if self.c.ignore_eos else self.ratio)

    def charge(self, budget: Budget, tokens: int, outputs: int) -> None:
        budget.total += self.up(tokens) + outputs + self.page
        budget.now += self.up(tokens) + self.page
        budget.input -= self.up(tokens)
        if budget.chunk is not None:
            budget.chunk -= self.up(tokens)

    def verdict(self, budget: Budget) -> str:
        if self.pool() - budget.total <= 0 or self.pool() - budget.now <= 0:
            return "full"
        if budget.input <= 0 or (budget.chunk is not None and budget.chunk <= 0):
            return "stop"
        return "go"

    def resets_full(self) -> bool:
        return not self.running or self.preempts

    def form_prefill(self) -> Batch | None:
        c = self.c
        if self.resets_full():
            self.full = False
        if self.chunked is None and (self.full or not self.waiting):
            return None
        places = min(c.max_running_requests - len(self.running), self.slots)
        if places <= 0 and self.chunked is None and not self.preempts:
            self.full = True
            return None
        self.order_queue()
        decodes = len(self.running) if self.mixes() else 0
        chunk = c.chunked_prefill_size - decodes if c.chunked_prefill_size > 0 else None
        total = sum(self.share(one) for one in self.running) + decodes
        budget = Budget(total, decodes, c.max_prefill_tokens - decodes, chunk)
        self.requeue = []
        rows: list[Row] = []
        continued = self.chunked
        if self.chunked is not None:
            self.continue_chunk(self.chunked, rows, budget)
        for request in list(self.waiting):
            if self.verdict(budget) == "stop":
                break
            held = sum(row.request.has_slot for row in rows)
            if len(rows) >= min(c.max_running_requests - len(self.running), self.slots + held):
                self.full = True
            if self.full and not (self.preempts and self.preempt(request, budget)):
                break
            result = self.admit(request, rows, budget)
            if result == "full":
                self.full = bool(rows or self.running)
            if result != "go":
                break
        added = [row.request for row in rows]
        self.waiting = [request for request in self.waiting if request not in added]
        for request in self.requeue:
            self.enqueue(request)
        if not rows:
            return None
        if self.chunked is not None:
            self.chunked.chunks += 1
        for request in added:
            if request is not continued:
                self.note_admission(request)
        batch = Batch("extend", rows, self.chunked)
        self.allocate(batch)
        if self.mixes() and self.running:
            self.mix(batch)
        return batch

    def note_admission(self, request: Request) -> None:
        (self.log.resumed if request.seen else self.log.new).append(request.name)
        self.log.cached[request.name] = request.prefix
        request.seen = True
        request.withdrawn = False
        request.inserted = 0

    def continue_chunk(self, request: Request, rows: list[Row], budget: Budget) -> None:
        assert budget.chunk is not None
        most = min(budget.chunk, int(self.pool() - budget.total))
        self.add_chunk(request, rows, budget, most if most > 0 else budget.chunk)

    def add_chunk(self, request: Request, rows: list[Row], budget: Budget, most: int) -> None:
        wanted = len(request.tokens()) - request.prefix
        tokens = min(wanted, most)
        self.add(request, rows, tokens)
        if wanted <= most:
            self.chunked = None
        self.charge(budget, tokens, 0 if wanted > most else self.clip(request.max_new))

    def add(self, request: Request, rows: list[Row], tokens: int) -> None:
        request.end = request.prefix + tokens
        rows.append(Row(request, tokens, decodes=False, kv=request.end))

    def admit(self, request: Request, rows: list[Row], budget: Budget) -> str:
        tokens = request.tokens()
        request.prefix = request.own = 0
        node = self.tree.root
        if self.cache:
            request.prefix, node = self.tree.match(tokens[:-1])
            request.own = request.prefix
            request.branch = self.tree.branch
            self.on_match(request, node)
        request.matched = (len(tokens), request.prefix)
        if self.c.prefill_max_requests is not None and len(rows) >= self.c.prefill_max_requests:
            return "stop"
        if not self.cache and self.c.ignore_eos:
            return self.admit_known(request, rows, budget)
        if self.cache:
            request.lock = self.tree.lock(node)
        before = len(rows)
        result = self.admit_piece(request, rows, budget)
        if len(rows) == before and request.lock is not None:
            self.tree.unlock(request.lock)
            request.lock = None
        return result

    def on_match(self, request: Request, node: Node) -> None:
        """See where the cached prefix of a candidate ends."""

    def admit_piece(self, request: Request, rows: list[Row], budget: Budget) -> str:
        extent = len(request.tokens()) - request.prefix
        left = self.clip(max(request.max_new - len(request.out), 0))
        if extent + left + self.page >= self.pool() - budget.total:
            return "full"
        limit = self.chunk_limit(extent, left, budget)
        if limit == "full":
            return "full"
        if self.c.chunked_prefill_size <= 0 and rows and self.up(extent) >= budget.input:
            return "stop"
        if limit is None or self.up(extent) <= int(limit):
            self.add(request, rows, extent)
            self.charge(budget, extent, self.clip(request.max_new))
            return self.verdict(budget)
        piece = self.down(int(limit))
        if piece <= 0:
            return "stop"
        self.add(request, rows, piece)
        self.chunked = request
        self.charge(budget, piece, 0)
        return self.verdict(budget)

    def chunk_limit(self, extent: int, left: int, budget: Budget) -> int | str | None:
        return budget.chunk

    def known_ends(self, request: Request, rows: list[Row], budget: Budget) -> bool:
        """Whether all requests could run to their limits, one after the other (§5.1)."""

        def share(one: Request) -> tuple[int, int]:
            return one.max_new - len(one.out), len(one.tokens())

        own = share(request)
        if budget.shares is None:
            found = [share(one) for one in [request, *self.running, *(row.request for row in rows)]]
            budget.shares = sorted((one for one in found if one[0] > 0), key=lambda one: one[0])
        elif own[0] > 0:
            place = len(list(takewhile(lambda one: one[0] < own[0], budget.shares)))
            budget.shares.insert(min(place, max(len(budget.shares) - 1, 0)), own)
        free = self.pool() - budget.now - self.up(len(request.tokens())) - self.page
        for index, (left, held) in enumerate(budget.shares):
            others = len(budget.shares) - index
            if free - left * others <= others:
                return False
            free += held
        return True

    def admit_known(self, request: Request, rows: list[Row], budget: Budget) -> str:
        extent = len(request.tokens())
        least = min(self.pool() - budget.now, self.pool() - budget.total)
        if self.up(extent) + self.page > least or not self.known_ends(request, rows, budget):
            return "full"
        if budget.chunk is None or extent <= budget.chunk:
            self.add(request, rows, extent)
            self.charge(budget, extent, self.clip(request.max_new))
        elif budget.chunk <= 0:
            return "stop"
        else:
            piece = budget.chunk
            self.add(request, rows, piece)
            self.chunked = request
            self.charge(budget, piece, 0)
        return self.verdict(budget)

    def preempt(self, request: Request, budget: Budget) -> bool:
        size, prefix = request.matched
        want = size - prefix + self.clip(request.max_new) - (self.pool() - budget.total)
        victims: list[Request] = []
        order = [one for one in self.running if not one.done]
        for one in sorted(order, key=lambda one: (one.priority * -self.sign, -one.entry)):
            gap = (request.priority - one.priority) * -self.sign
            if gap <= self.c.priority_scheduling_preemption_threshold:
                break
            victims.append(one)
            want -= self.clip(one.max_new - len(one.out)) * self.ratio
            if want <= 0:
                break
        if not victims or want > 0:
            return False
        left = len(self.running)
        for one in [one for one in self.running if one in victims]:
            budget.total -= self.share(one)
            left -= 1
            self.release(one, inserts=False)
            self.room(left * self.c.retract_decode_steps)
            one.forget()
        self.running = [one for one in self.running if one not in victims]
        self.requeue += victims
        self.log.preempted += [one.name for one in victims]
        return True

    def allocate(self, batch: Batch) -> None:
        needed = pages = 0
        for request in batch.requests():
            if not request.has_slot:
                request.has_slot = True
                self.slots -= 1
            needed += request.end - request.prefix
            pages += self.up(request.end) - self.up(request.prefix)
        self.room(needed if self.page == 1 else needed + self.page * len(batch.rows))
        self.take(pages)
        for request in batch.requests():
            request.kv = request.end

    def mix(self, batch: Batch) -> None:
        _, dropped = self.drop_ending()
        if dropped:
            self.full = False
        if not self.running or not self.fits(self.running):
            return
        self.grow()
        batch.mode = "mixed"
        batch.rows += [Row(one, 1, decodes=True, kv=one.kv) for one in self.running]
        self.running = []
