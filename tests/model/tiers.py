"""A slow, obvious model of one worker whose blocks go down to a host and the tiers below it, and come back.

The scheduler is that of `vllm_scheduler`; this adds where blocks are, and who waits for what. A load is taken unless
computing would take no longer (`ns_per_token`), and never fails. Evicts from the host and below by least recent use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tier_loads import LoadsUp

if TYPE_CHECKING:
    from .vllm_blocks import Block
    from .vllm_requests import Plan, Request


class TieredModel(LoadsUp):
    """`begin` and `end` make a step; `land` lets transfers arrive; times never decrease."""

    # --- steps --------------------------------------------------------------------------------------------

    def begin(self, now_ns: int) -> Plan | None:
        """None: nothing can be computed until a transfer ends."""
        self.land(now_ns)
        self.resume()
        plan = self._schedule()
        busy = bool(self.copies or self.loading or any(not ended for _, _, ended in self.under_way))
        some = self.running or self.waiting or self.parked
        if not plan.scheduled and not plan.preempted and self._unreceived is None and some and busy:
            return None
        return plan

    def end(self, plan: Plan, now_ns: int) -> None:
        """The update that follows the schedule: asynchronously that of the plan before, which has been computed."""
        self.land(now_ns)
        received: Plan | None = plan
        if self.config.async_scheduling:
            received, self._unreceived = self._unreceived, plan if plan.scheduled else None
        if received is None:
            return
        for request in received.scheduled:
            done = self.through.get(request, 0)
            full = min(request.keyed, received.ends[request] // self.config.block_size)
            if self.tiers.write_through and request.status == "running" and full > done:
                self.through[request] = full
                self.write_through(request.table[done:full])
        self.land(now_ns)
        self._update(received)

    def cancel(self, request_id: str) -> None:
        for request in self.parked:
            if request.id == request_id:
                park = self.parks.pop(request)
                self.parked.remove(request)
                if request in self.ready:
                    self.ready.remove(request)
                else:
                    for load in park.loads:
                        if park in load.waiters:
                            load.waiters.remove(park)
                    self.pool.release(park.pins)
                request.status = "finished"
                return
        gone = next(r for r in self.running + self.waiting if r.id == request_id)
        super().cancel(request_id)
        self.parks.pop(gone, None)
        self.stop_waiting(gone)

    # --- the scheduler, where room may take time ----------------------------------------------------------

    def _there(self) -> int:
        return super()._there() + len(self.parked)

    def _schedule_running(self, plan: Plan) -> None:
        cursor = 0
        while cursor < len(self.running) and plan.budget > 0:
            request = self.running[cursor]
            count = 0 if self.waits_for_room(request) else self._next_tokens(request, plan)
            if count == 0:
                cursor += 1
                continue
            keyed_before, blocks_before = request.keyed, len(request.table)
            while (room := self.grow(request, count)) == "short":
                victim = self._choose_victim()
                if self.running.index(victim) < cursor:
                    cursor -= 1
                self.stop_waiting(victim)
                self._preempt(victim, plan)
                if victim is request:
                    return
            cursor += 1
            if room == "wait":
                continue
            plan.keyed_before[request] = keyed_before
            self._give(request, count, request.table[blocks_before:], plan)

    def grow(self, request: Request, count: int) -> str:
        total = request.computed + count
        missing = max(0, self._blocks_for(total) - len(request.table))
        blocks = self.take(request, missing)
        if isinstance(blocks, str):
            return blocks
        request.table += blocks
        self._store_full_blocks(request, total)
        return "taken"

    def fits(self, request: Request, count: int, hits: list[Block]) -> bool:
        config = self.config
        extra = sum(block.refs == 0 for block in hits)
        if self.running:
            extra += int(config.watermark * config.num_blocks)
        totals = [len(hits) * config.block_size + count]
        if config.scheduler_reserve_full_isl:
            totals.append(len(request.tokens))
        return all(max(0, self._blocks_for(t) - len(hits)) + extra <= self.pool.free_count() for t in totals)

    def _admit(self, plan: Plan) -> None:
        config = self.config
        while self.waiting and plan.budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting[0]
            if self.waits_for_room(request):
                return
            hits = self.pool.find(request.tokens)
            hit_tokens = len(hits) * config.block_size
            count = self._capped(len(request.tokens) - hit_tokens, plan)
            if count > plan.budget and not config.enable_chunked_prefill:
                return
            count = min(count, plan.budget)
            if not self.fits(request, count, hits):
                return
            outcome = self.onboard(request, hits)
            if outcome == "parked":
                continue
            if outcome == "retry":
                return
            self.pool.take_hits(hits)
            missing = max(0, self._blocks_for(hit_tokens + count) - len(hits))
            blocks = self.take(request, missing)
            if isinstance(blocks, str):
                self.pool.release(hits)
                return
            request.table = hits + blocks
            request.keyed = len(hits)
            self._store_full_blocks(request, hit_tokens + count)
            self.waiting.pop(0)
            self._start(request, hit_tokens, count, plan)
            self.count_origins(request, hits)
            self.slow_loads += outcome == "slow"

    def count_origins(self, request: Request, hits: list[Block]) -> None:
        for block in hits:
            self.reuse[block.id] = self.reuse.get(block.id, 0) + 1
        self.tried.discard(request)
        self.through[request] = 0
        park = self.parks.pop(request, None)
        if park is None:
            return
        self.parked_ns[request] = self.parked_ns.get(request, 0) + park.parked_ns
        counts = self.from_below.setdefault(request, [0, 0, 0])
        for position, tier in enumerate(park.tiers, park.first_block):
            if tier > 1 and position < len(hits):
                counts[tier - 2] += self.config.block_size
