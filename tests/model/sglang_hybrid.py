"""SGLang's scheduler with sliding windows, and with states: what differs from full attention."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from model.sglang_base import OutOfMemoryError
from model.sglang_parts import StateTree, WindowTree
from model.sglang_scheduler import Scheduler

if TYPE_CHECKING:
    from model.sglang_requests import Batch, Budget, Request, Row
    from model.sglang_tree import Node
    from understudy.conformance.sglang_recording import SglangScenarioConfig

KERNEL = 64  # tokens that a kernel of linear attention computes at once


class WindowScheduler(Scheduler):
    """A second pool for KV of windows."""

    tree: WindowTree

    def __init__(self, config: SglangScenarioConfig) -> None:
        assert config.swa_window is not None
        assert config.swa_tokens is not None
        self.window, self.size = config.swa_window, config.swa_tokens
        super().__init__(config)

    def make_tree(self) -> WindowTree:
        c = self.c
        events, total = c.kv_events and self.cache, c.max_total_num_tokens
        return WindowTree(
            self.page, c.radix_eviction_policy, total, self.size, self.window, has_events=events
        )

    def free(self) -> int:
        return min(self.tree.avail, self.tree.free)

    def take(self, tokens: int) -> None:
        super().take(tokens)
        self.tree.free -= tokens

    # -- admission
    def left_window(self, budget: Budget) -> int:
        return self.tree.free + (self.tree.sums()[0] if self.cache else 0) - budget.window

    def window_need(self, tokens: int, outputs: int, chunk: int | None) -> int:
        piece = tokens if chunk is None else min(tokens, chunk)
        return max(piece - self.window, 0) + min(tokens + outputs, self.window) + self.page

    def charge(self, budget: Budget, tokens: int, outputs: int) -> None:
        budget.window += self.window_need(self.up(tokens), outputs, budget.chunk)
        super().charge(budget, tokens, outputs)

    def verdict(self, budget: Budget) -> str:
        return "full" if self.left_window(budget) <= 0 else super().verdict(budget)

    def resets_full(self) -> bool:
        return True

    def continue_chunk(self, request: Request, rows: list[Row], budget: Budget) -> None:
        assert budget.chunk is not None
        most = min(budget.chunk, int(self.pool() - budget.total), self.left_window(budget) - self.page)
        if most > 0:  # else it is parked
            self.add_chunk(request, rows, budget, most)

    def chunk_limit(self, extent: int, left: int, budget: Budget) -> int | str | None:
        need = self.window_need(self.up(extent), left, budget.chunk)
        if need < self.left_window(budget):
            return budget.chunk
        cap = self.down(max(self.left_window(budget) - self.window_need(0, left, None), 0))
        if need < self.size or budget.chunk is None or cap <= 0:
            return "full"
        return min(budget.chunk, cap)

    def known_ends(self, request: Request, rows: list[Row], budget: Budget) -> bool:
        left = self.clip(max(request.max_new - len(request.out), 0))
        return self.window_need(len(request.tokens()), left, budget.chunk) <= self.left_window(budget)

    # -- windows
    def slide(self, request: Request, token: int) -> None:
        """Give back window KV before the window of a token."""
        if token - self.window < request.window_begin + 1:
            return
        begin = max(request.window_begin, request.own)
        kept = self.up(max(self.window, self.page)) if self.cache else self.window
        end = max(begin, self.down(max(begin, token - kept)))
        self.tree.free += end - begin
        request.window_begin = end

    def allocate(self, batch: Batch) -> None:
        behind = max(self.c.chunked_prefill_size, 0) if self.c.overlap else 0
        for request in batch.requests() if not self.cache else []:
            self.slide(request, request.prefix - behind)
        super().allocate(batch)

    def grow(self) -> None:
        for request in self.running:
            decodes, last = request.kv - request.end, len(request.tokens()) - 1
            due = last - self.window >= request.window_begin + self.c.swa_eviction_interval
            if decodes >= 1 and due:
                self.slide(request, last)
            if (
                self.cache
                and self.c.release_prefill_swa
                and decodes >= self.window
                and request.lock is not None
            ):
                self.tree.release_window(request.lock)
        super().grow()

    def checkpoint(self, request: Request, count: int, *, ends: bool) -> None:
        branch = request.branch
        at_branch = branch is not None and request.own < branch <= count
        end = branch if at_branch and branch is not None else count
        if not ends:
            self.slide(request, end - 1)
        if end == 0:
            return
        whole = self.down(end)
        done = self.tree.insert(request.tokens()[:whole], request.own, request.inserted, request.window_begin)
        self.tree.avail += done.freed
        self.tree.free += done.freed_window
        request.inserted = max(request.inserted, whole)
        if request.lock is not None:
            self.tree.unlock(request.lock)
        request.lock = self.tree.lock(done.node)
        request.own = whole
        if at_branch:
            request.branch = None
            if not ends:
                self.slide(request, request.end - 1)

    def release(self, request: Request, *, inserts: bool) -> None:
        if inserts and self.cache:
            self.checkpoint(request, request.kv, ends=True)
        held = self.up(request.kv)
        self.tree.free += held - max(request.own, min(request.window_begin, held))
        super().release(request, inserts=False)
        request.window_begin = 0


class StateScheduler(Scheduler):
    """A second pool for states."""

    tree: StateTree

    def __init__(self, config: SglangScenarioConfig) -> None:
        c = config
        self.chunk = max(KERNEL, c.page_size)
        self.grid = lcm(self.chunk, c.page_size)
        self.track = lcm(self.grid, c.mamba_track_interval)
        self.buffered = c.mamba_extra_buffer and not c.disable_radix_cache
        self.lazy = self.buffered and c.mamba_lazy
        self.tracking = 0
        if c.mamba_extra_buffer:
            self.tracking = 1 if self.lazy or not c.overlap else 2
        super().__init__(config)

    def make_tree(self) -> StateTree:
        c = self.c
        assert c.mamba_slots is not None
        events, most = c.kv_events and self.cache, c.mamba_max_states_per_path
        policy, total = c.radix_eviction_policy, c.max_total_num_tokens
        return StateTree(self.page, policy, total, c.mamba_slots, self.grid, most, has_events=events)

    def take_slots(self, slots: int) -> None:
        if self.cache:
            self.tree.evict_parts(slots)
        if self.tree.free < slots:
            raise OutOfMemoryError
        self.tree.free -= slots

    def admit(self, request: Request, rows: list[Row], budget: Budget) -> str:
        before = len(rows)
        result = super().admit(request, rows, budget)
        if len(rows) == before and request.has_state:
            request.has_state = False
            self.tree.free += 1
        return result

    def on_match(self, request: Request, node: Node) -> None:
        """Copy the cached state, for the request to compute on."""
        if not node.part or request.has_state:
            return
        lock = self.tree.lock(node)
        self.take_slots(1)
        self.tree.unlock(lock)
        request.has_state = True

    def allocate(self, batch: Batch) -> None:
        requests = batch.requests()
        states = sum(not one.has_state for one in requests)
        self.take_slots(states + self.tracking * sum(one.tracking == 0 for one in requests))
        for request in requests:
            request.has_state = True
            if request.tracking == 0:
                request.tracking, request.before = self.tracking, None
        super().allocate(batch)
        for row in batch.rows if self.buffered else []:
            self.track_prefill(row.request, row.tokens)

    def track_prefill(self, request: Request, tokens: int) -> None:
        if tokens < self.grid:
            return
        last = request.prefix + tokens // self.grid * self.grid
        computed = request.prefix + tokens // KERNEL * KERNEL
        end = request.end if computed == last else last + 1
        branch = request.branch
        if (
            branch is not None
            and request.prefix < branch < end
            and (branch - request.prefix) % self.chunk == 0
        ):
            last = branch
        request.last = last

    def grow(self) -> None:
        super().grow()
        for request in self.running if self.lazy else []:
            if request.kv % self.track == 0 and request.tracking == 1:
                if self.tree.free > 0:
                    self.tree.free -= 1
                    request.tracking = 2
                else:
                    request.last = None

    def mix(self, batch: Batch) -> None:
        super().mix(batch)
        for row in batch.rows if self.lazy else []:
            if row.decodes and row.kv % self.track == 0:
                row.request.untracked = row.kv
                self.drop_second(row.request)

    def drop_second(self, request: Request) -> None:
        if request.tracking == 2:
            request.tracking = 1
            self.tree.free += 1

    def before_output(self, row: Row) -> None:
        if not self.buffered:
            return
        request = row.request
        if self.lazy and request.kv == row.kv + 1 and request.kv % self.track == 0:
            number = len(request.out) + 1
            eos = request.eos_at == number and not self.c.ignore_eos
            ends = request.to_abort or eos or number >= request.max_new
            if ends and request.tracking == 1 and request.untracked != request.kv:
                request.caches_end = False
        if row.kv % self.track == 0:
            if self.lazy:
                self.drop_second(request)
            else:
                request.before = request.last
            request.last = row.kv

    def checkpoint(self, request: Request, count: int, *, ends: bool) -> None:
        end = count
        if self.buffered:
            end = request.last or 0
            if end > count:
                two = self.c.overlap and request.before is not None and request.before <= count
                end = count if not ends else (request.before or 0) if two else 0
        copies = not ends and end > 0
        if copies:
            if self.tree.free < 1 and self.lazy and request.lock is not None:
                self.tree.release_state(request.lock)
            self.take_slots(1)
        taken = 0
        if end > 0:
            whole = self.down(end)
            done = self.tree.insert(request.tokens()[:whole], request.own, request.inserted)
            self.tree.avail += done.freed
            request.inserted = max(request.inserted, whole)
            if request.lock is not None:
                self.tree.unlock(request.lock)
            request.lock = self.tree.lock(done.node)
            request.own = whole
            taken = 0 if done.part_exists else 1
        if ends:
            self.tree.free += int(request.has_state) + request.tracking - taken
            request.has_state, request.tracking = False, 0
        elif copies:
            self.tree.free += 1 - taken
        request.last = request.before = None

    def release(self, request: Request, *, inserts: bool) -> None:
        super().release(request, inserts=inserts and request.caches_end)
        self.tree.free += int(request.has_state) + request.tracking
        request.has_state, request.tracking = False, 0
        request.last = request.before = None
