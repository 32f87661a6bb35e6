"""A slow model of TensorRT-LLM's executor loop and KVCacheV2Scheduler: one pass after another, as lists of requests.

It has neither page numbers nor events, nor slots that one forward pass borrows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.trtllm_cache import RequestCache
from model.trtllm_pages import Store
from model.trtllm_requests import CONTEXT, DONE, GENERATION, TO_COMPLETE, Batch, Deadlock, Request, Round

if TYPE_CHECKING:
    from understudy.conformance.trtllm_recording import TrtRequest, TrtScenarioConfig


class TrtModel:
    """Runs a scenario pass by pass. `pools` are the pages of each level; the rest is that of a recording's header."""

    def __init__(
        self,
        config: TrtScenarioConfig,
        requests: list[TrtRequest],
        *,
        pools: list[int],
        chunk_unit: int,
        longest: int,
    ) -> None:
        self.config, self.given = config, requests
        self.chunk_unit, self.longest = chunk_unit, longest
        windows = config.windows or [longest]
        of_layers = [windows[i % len(windows)] for i in range(config.layers)]
        cycles = dict.fromkeys(None if window >= longest else window for window in of_layers)
        self.store = Store(pools, config.tokens_per_block, list(cycles))
        self.caches: dict[int, RequestCache] = {}
        self.active: list[Request] = []
        self.waiting: list[Request] = []
        self.previous: Batch | None = None
        self.arrivals = sorted(range(len(requests)), key=lambda i: (requests[i].arrival, i))
        self.cancels = sorted((one.cancel, i) for i, one in enumerate(requests) if one.cancel is not None)
        self.cancelled: list[int] = []
        self.clock = self.step = -1
        self.withheld = 0
        self.line: dict[str, Any] = {}

    # ── A pass ──

    def next_pass(self) -> dict[str, Any] | None:
        """Run a pass and describe it; None: all requests have ended. Deadlock: the real server dies."""
        self.step += 1
        self.clock += 1
        lists = ("ctx", "gen", "suspended", "recompute", "sampled", "finished")
        self.line = {"step": self.step, "clock": self.clock, **{name: [] for name in lists}}
        if not self._fetch():
            return None
        batch, paused = self._schedule()
        for request in paused:
            self._free(request)
        runs = bool(batch.contexts or batch.generation)
        self.line["ctx"] = [[one.number, one.position, one.chunk] for one in batch.contexts]
        self.line["gen"] = [one.number for one in batch.generation]
        if self.config.overlap:
            self._finish_overlapped(batch if runs else None, paused)
        else:
            self._pause(paused)
            if runs:
                self._advance(batch)
                self._sample(batch)
                self._commit(batch)
                self._answer(batch)
        self._describe()
        return self.line

    def _finish_overlapped(self, batch: Batch | None, paused: list[Request]) -> None:
        previous, self.previous = self.previous, batch
        if previous is not None:
            self._sample(previous)
        self._pause(paused)
        if batch is not None:
            self._advance(batch)
            self._commit(batch)
        if previous is not None:
            self._answer(previous)
        for one in batch.generation if batch is not None else ():
            if one.state != DONE and one.generated + 1 >= one.max_new:
                one.state = TO_COMPLETE

    def _fetch(self) -> bool:
        if not self.active and not self.waiting:
            times = [self.given[i].arrival for i in self.arrivals[:1]] + [
                time for time, _ in self.cancels[:1]
            ]
            if times:
                self.clock = self.line["clock"] = max(self.clock, min(times))
        fetched = []
        while self.arrivals and self.given[self.arrivals[0]].arrival <= self.clock:
            number = self.arrivals.pop(0)
            given = self.given[number]
            tokens = [first + k for first, count in given.runs() for k in range(count)]
            fetched.append(
                Request(number, given, tokens, given.max_new, prompt=len(tokens), chunk=len(tokens))
            )
        has_cancels = False
        while self.cancels and self.cancels[0][0] <= self.clock:
            self.cancelled.append(self.cancels.pop(0)[1])
            has_cancels = True
        self.line["fetched"] = [one.number for one in fetched]
        if not (self.arrivals or self.cancels or self.active or self.waiting or fetched or has_cancels):
            return False
        self.waiting += fetched
        if self.config.waiting_policy == "priority":
            self.waiting.sort(key=lambda one: -one.given.priority)
        room = max(0, self.config.max_batch_size - len(self.active))
        self.active += self.waiting[:room]
        del self.waiting[:room]
        return True

    # ── Scheduler ──

    def _schedule(self) -> tuple[Batch, list[Request]]:
        aside: list[Request] = []
        suspended: list[Request] = []
        paused: list[Request] = []
        batch = Batch(generation=self._schedule_generation(aside, suspended, paused))
        used = len(batch.generation)
        contexts: list[Request] = []
        for one in aside:
            if len(batch.generation) + len(contexts) >= self.config.max_batch_size:
                break
            taken = self._take_chunk(one, used) if self.config.chunked else self._take_whole(one, used)
            if taken is None:
                break
            if taken:
                contexts.append(one)
                used += taken
        nothing = not contexts and not batch.generation and not suspended and not paused
        if nothing and any(one.state == GENERATION for one in self.active):
            raise Deadlock
        if self._withholds(contexts, batch.generation):
            contexts = []
        more = [one for one in contexts if one.chunk < one.left]
        last = [one for one in contexts if one.chunk == one.left]
        batch.contexts, batch.ending = more + last, last + batch.generation
        return batch, paused

    def _schedule_generation(
        self, aside: list[Request], suspended: list[Request], paused: list[Request]
    ) -> list[Request]:
        order = list(self.active)
        scheduled: list[Request] = []
        state = Round(end=len(order), frontier=len(order))
        place = -1
        while (place := place + 1) < state.end:
            one = order[place]
            if one in paused:
                continue
            if len(scheduled) >= self.config.max_batch_size:
                break
            if one.state == CONTEXT:
                aside.append(one)
            if one.state != GENERATION:
                continue
            if len(scheduled) + 1 > self.config.max_num_tokens:
                break
            done = self._allocate(one) or self._suspend_others(order, place, state, suspended)
            if not done and self.config.recompute_pause:
                done = self._pause_others(order, place, state, suspended, paused)
            if not done:
                if self._holds_device(one):
                    self._suspend(one, suspended)
                break
            scheduled.append(one)
        return scheduled

    def _allocate(self, request: Request) -> bool:
        cache = self.caches.get(request.number)
        if cache is None or not (cache.is_active or cache.resume(self.config.max_util_for_resume)):
            return False
        return cache.resize(cache.capacity + 1)

    def _holds_device(self, request: Request) -> bool:
        return request.number in self.caches and self.caches[request.number].is_active

    def _suspend(self, request: Request, suspended: list[Request]) -> None:
        self.caches[request.number].suspend()
        self.line["suspended"].append(request.number)
        suspended.append(request)

    def _suspend_others(
        self, order: list[Request], place: int, state: Round, suspended: list[Request]
    ) -> bool:
        """Suspend the last requests, one after the other, until this one has a page."""
        while True:
            behind = range(state.end - 1, place, -1)
            victim = next((j for j in behind if order[j].is_started and self._holds_device(order[j])), None)
            if victim is None:
                return False
            self._suspend(order[victim], suspended)
            state.end = victim
            if self._allocate(order[place]):
                return True

    def _pause_others(
        self,
        order: list[Request],
        place: int,
        state: Round,
        suspended: list[Request],
        paused: list[Request],
    ) -> bool:
        """Free requests that will be computed again, until this one has a page."""
        has_host = len(self.store.totals) > 1

        def may_pause(one: Request) -> bool:
            return one.is_started and one.state != TO_COMPLETE

        while True:
            victim = next(
                (
                    order[j]
                    for j in range(state.frontier - 1, place, -1)
                    if order[j] not in paused
                    and may_pause(order[j])
                    and (has_host or order[j] not in suspended)
                ),
                None,
            )
            if victim is None and has_host:
                victim = next((one for one in suspended if may_pause(one)), None)
            if victim is None:
                return False
            if victim in suspended:
                suspended.remove(victim)
            self.line["recompute"].append(victim.number)
            self._free(victim)
            paused.append(victim)
            state.frontier = min(state.frontier, order.index(victim))
            if self._allocate(order[place]):
                return True
            if has_host and self._suspend_others(order, place, state, suspended):
                return True

    def _take_whole(self, one: Request, used: int) -> int | None:
        """Return the tokens that a prompt takes of the budget; 0: skip it; None: stop."""
        before = one.left
        if not self.config.prefix_aware and used + before > self.config.max_num_tokens:
            return None
        if not self._prepare(one):
            return None
        count = one.left if self.config.prefix_aware else before
        if used + count > self.config.max_num_tokens:
            return None
        return count if self._grow(one, one.left) else 0

    def _take_chunk(self, one: Request, used: int) -> int:
        rest, before = self.config.max_num_tokens - used, one.left
        if rest < max(self.chunk_unit, 1) or not self._prepare(one):
            return 0
        count = one.left if self.config.prefix_aware else before
        taken = min(rest, count)
        if taken < count:
            taken -= taken % self.chunk_unit
        if not taken:
            return 0
        one.chunk = min(taken, one.left)
        return taken if self._grow(one, one.chunk) else 0

    def _prepare(self, one: Request) -> bool:
        """Match the prompt of a request that has not begun, and have its cache on the device."""
        reuse, limit = self.config.enable_block_reuse, self.config.max_util_for_resume
        if one.position == one.reused:
            cache = self.caches.get(one.number)
            if cache is None:
                cache = self.caches[one.number] = RequestCache(
                    self.store,
                    (one.given.salt,),
                    tuple(one.tokens[: one.prompt - 1]) if reuse else None,
                    partial=self.config.enable_partial_reuse,
                    minimal=reuse and self.config.reuse_policy != "all_reusable",
                )
            if not reuse:
                cache.stop()
            else:
                one.position = one.reused = len(cache.tokens)
                if one.reused:
                    one.chunk = min(one.chunk, one.left)
        cache = self.caches[one.number]
        return cache.is_active or cache.resume(limit)

    def _grow(self, one: Request, count: int) -> bool:
        cache = self.caches[one.number]
        if cache.resize(max(cache.capacity, one.position + count)):
            return True
        if one.position == one.reused:
            cache.suspend()
        return False

    def _withholds(self, contexts: list[Request], generation: list[Request]) -> bool:
        most, share = self.config.batch_wait_timeout_iters, self.config.batch_wait_max_tokens_ratio
        if not (contexts and generation and (most > 0 or share > 0)):
            return False
        tokens = sum(one.chunk for one in contexts) + len(generation)
        waits = self.withheld < most and tokens < share * self.config.max_num_tokens
        self.withheld = self.withheld + 1 if waits else 0
        return waits

    # ── Behind the forward pass ──

    def _free(self, request: Request) -> None:
        cache = self.caches.pop(request.number, None)
        if cache is not None:
            cache.close()

    def _pause(self, paused: list[Request]) -> None:
        for one in paused:
            if one in self.active and one.state != DONE:
                one.max_new -= one.generated
                one.prompt = one.chunk = len(one.tokens)
                one.position = one.reused = 0
                one.state = CONTEXT

    def _advance(self, batch: Batch) -> None:
        for one in batch.contexts:
            if one.state != DONE:
                one.position += one.chunk
                one.chunk = 0
            if one.left == 0:
                ends = self.config.overlap and one.generated + 1 >= one.max_new
                one.state = TO_COMPLETE if ends else GENERATION

    def _sample(self, batch: Batch) -> None:
        for one in batch.ending:
            if one.state == DONE:
                continue
            one.tokens.append(1_000_000 + one.number * 100_000 + one.outputs)
            self.line["sampled"].append([one.number, one.outputs])
            one.outputs += 1
            stops = one.given.eos_at is not None and one.outputs >= one.given.eos_at
            if stops or one.generated >= one.max_new or len(one.tokens) >= self.longest:
                one.state = DONE

    def _commit(self, batch: Batch) -> None:
        reuse, keeps_all = self.config.enable_block_reuse, self.config.reuse_policy == "all_reusable"
        for one in batch.contexts:
            cache = self.caches.get(one.number)
            if cache is None or not cache.is_active:
                continue
            if not reuse or not keeps_all:
                cache.resize(history=one.position)
            if reuse and (keeps_all or one.left == 0):
                if one.position > len(cache.tokens):
                    cache.commit(one.tokens[len(cache.tokens) : one.position])
                if one.left == 0:
                    cache.stop()

    def _answer(self, batch: Batch) -> None:
        self.waiting = [one for one in self.waiting if one.number not in self.cancelled]
        for one in self.active:
            if one.number in self.cancelled:
                one.state = DONE
        self.cancelled = []
        ended = [one for one in self.active if one.state == DONE]
        self.active = [one for one in self.active if one.state != DONE]
        for one in ended:
            self._free(one)
        self.line["finished"] = sorted(one.number for one in ended)
        for one in batch.generation:
            cache = self.caches.get(one.number)
            if cache is not None and cache.is_active:
                cache.resize(history=len(one.tokens) - 1)

    def _describe(self) -> None:
        store = self.store
        self.line["active"] = [[one.number, one.state, one.position, one.prompt] for one in self.active]
        self.line["waiting"] = len(self.waiting)
        self.line["caches"] = [
            [number, "ACTIVE" if one.is_active else "SUSPENDED", one.capacity, one.history, len(one.tokens)]
            for number, one in self.caches.items()
        ]
        self.line["copies"] = [list(copy) for copy in store.copies]
        store.copies.clear()
        self.line["pool"] = [
            [store.totals[level], store.free[level] + len(listed), len(listed)]
            for level, listed in enumerate(store.lists)
        ]
