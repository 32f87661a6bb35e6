"""A slow, obvious model of the vLLM v1 scheduler: the oracle for the simulated engine.

One worker, one full-attention KV cache group, text prompts; speculation as bursts of tokens, without a draft
model. No clock: `VllmModel.step` does one engine step. `run_scenario` (vllm_runs.py) turns a scenario file into
the lines of its golden file.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from .vllm_blocks import BlockPool
from .vllm_config import RECORDED, Config, Profile
from .vllm_format import KvEvent, RequestSpec, StepRecord, expand_prompt, output_token
from .vllm_requests import BurstModel, Plan, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .vllm_blocks import Block


class VllmModel:
    """The scheduler. Call `add` and `cancel` between steps only."""

    def __init__(self, config: Mapping[str, Any] | Config, profile: Profile = RECORDED) -> None:
        self.config = config if isinstance(config, Config) else Config.parse(config, profile)
        self.profile = profile
        self.pool = BlockPool(self.config, profile)
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # in the order in which they will be tried
        self.steps = 0
        self.phantom_hit_blocks = 0  # hits on blocks that nobody ever computed
        self.bursts = BurstModel(self.config.accept_rates(), self.config.aic_mtp_seed)
        self._unreceived: Plan | None = None  # asynchronous: scheduled, its outputs not yet received

    def add(self, spec: RequestSpec, index: int) -> None:
        """Queue a request; `index` is its position in the scenario and decides its output tokens."""
        tokens = expand_prompt(spec["prompt"])
        if not tokens or spec["max_tokens"] < 1:
            raise ValueError(f"request {spec['id']}: needs a prompt and max_tokens of at least 1")
        if len(tokens) >= self.config.max_model_len:
            raise ValueError(f"request {spec['id']}: the prompt leaves no room for outputs in max_model_len")
        if any(request.id == spec["id"] for request in self.running + self.waiting):
            raise ValueError(f"request {spec['id']}: this id is already in use")
        priority, arrival_time = spec.get("priority", 0), spec.get("arrival_time", index)
        request = Request(spec["id"], index, tokens, spec["max_tokens"], priority, arrival_time)
        request.eos_at, request.lora = spec.get("eos_at"), spec.get("lora", 0)
        self._enqueue(request)

    def cancel(self, request_id: str) -> None:
        """Drop a running or waiting request; its blocks are freed and a token in flight is ignored."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self._free(request)
                    request.status = "finished"
                    return
        raise KeyError(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a request of that id runs or waits."""
        return any(request.id == request_id for request in self.running + self.waiting)

    def step(self, mid: Callable[[], None] = lambda: None) -> StepRecord:
        """One engine step: schedule, then the update for this schedule (asynchronous: for the one before).

        `mid` is called between the two.
        """
        plan = self._schedule()
        free_after_schedule = self.pool.free_count()
        mid()

        received: Plan | None = plan
        if self.config.async_scheduling:
            received, self._unreceived = self._unreceived, plan
        finished: list[Request] = []
        kv_events: list[KvEvent] = []
        if received is not None:
            finished = self._update(received)
            kv_events = self.pool.publish()

        record: StepRecord = {
            "step": self.steps,
            "scheduled": {request.id: count for request, count in plan.scheduled.items()},
            "new": _ids(plan.new),
            "cached": {request.id: plan.cached[request] for request in plan.new + plan.resumed},
            "resumed": _ids(plan.resumed),
            "preempted": _ids(plan.preempted),
            "finished": _ids(finished),
            "running": _ids(self.running),
            "waiting": len(self.waiting),
            "waiting_head": _ids(self._skipped_first()[:4]),
            "free_blocks": self.pool.free_count(),
            "free_after_schedule": free_after_schedule,
            "free_head": self.pool.free_head(4),
            "kv_events": kv_events,
        }
        self.steps += 1
        return record

    # --- schedule -----------------------------------------------------------------------------------------

    def _schedule(self) -> Plan:
        plan = Plan(budget=self.config.max_num_batched_tokens, prefill_cap=self._prefill_cap())
        self._schedule_running(plan)
        if not plan.preempted:
            self._admit(plan)
        for request, count in plan.scheduled.items():
            request.computed += count
            plan.ends[request] = request.computed
            if request.computed == len(request.tokens) + request.ahead:
                plan.samples.add(request)
                if self.config.async_scheduling:
                    request.ahead += 1
        return plan

    def _schedule_running(self, plan: Plan) -> None:
        """Phase 1: give every running request its next tokens, preempting where blocks are short."""
        cursor = 0
        while cursor < len(self.running) and plan.budget > 0:
            request = self.running[cursor]
            count = self._next_tokens(request, plan)
            if count == 0:
                cursor += 1
                continue
            keyed_before, blocks_before = request.keyed, len(request.table)
            while not self._allocate(request, count, hits=[], admission=False):
                victim = self._choose_victim()
                if self._spared(victim):
                    return
                if self.running.index(victim) < cursor:
                    cursor -= 1
                self._preempt(victim, plan)
                if victim is request:
                    return
            plan.keyed_before[request] = keyed_before
            self._give(request, count, request.table[blocks_before:], plan)
            cursor += 1

    def _give(self, request: Request, count: int, fresh: list[Block], plan: Plan) -> None:
        """Give a request so many tokens of the step; `fresh` are the blocks that it got for them."""
        plan.scheduled[request] = count
        plan.new_blocks[request] = list(fresh)
        plan.budget -= count

    def _spared(self, victim: Request) -> bool:  # noqa: ARG002
        """Whether a victim may not be preempted now, which ends phase 1."""
        return False

    def _next_tokens(self, request: Request, plan: Plan) -> int:
        """How many tokens a running request may compute now; 0: it is passed over."""
        if request.ahead > 0 and (
            request.computed + 2 - request.ahead >= request.prompt_tokens + request.max_tokens
        ):
            return 0  # its last token is in flight
        count = self._capped(len(request.tokens) + request.ahead - request.computed, plan)
        return min(count, plan.budget, self.config.max_model_len - request.computed - 1)

    def _prefill_cap(self) -> int | None:
        """The most tokens of one request in this schedule, going by how many there are."""
        there = self._there()
        threshold = self.config.long_prefill_token_threshold
        if threshold == 0 or (there <= 1 and not self.profile.caps_lone_prefill):
            return None
        if self.config.long_prefill_token_threshold_adaptive:
            return max(threshold, self.config.max_num_batched_tokens // max(there, 1))
        return threshold

    def _there(self) -> int:
        return len(self.running) + len(self.waiting)

    def _capped(self, count: int, plan: Plan) -> int:
        return count if plan.prefill_cap is None else min(count, plan.prefill_cap)

    def _choose_victim(self) -> Request:
        if self.config.policy == "fcfs":
            return self.running[-1]
        # max returns the first of equals: the one nearest the front.
        return max(self.running, key=lambda request: (request.priority, request.arrival_time))

    def _preempt(self, victim: Request, plan: Plan) -> None:
        self.running.remove(victim)
        if victim in plan.scheduled:  # undo its turn, but not what its allocation did to the index
            plan.budget += plan.scheduled.pop(victim)
            for block in victim.table[plan.keyed_before[victim] : victim.keyed]:
                if self.profile.phantom_hit:
                    block.phantom = True
                else:
                    self.pool.remove_key(block)
        self._free(victim)
        victim.computed = 0
        victim.ahead = 0
        victim.status = "preempted"
        self._enqueue(victim)
        plan.preempted.append(victim)

    def _enqueue(self, request: Request) -> None:
        if self.config.policy == "priority":
            self.waiting.append(request)
            self.waiting.sort(key=lambda waiting: (waiting.priority, waiting.arrival_time, waiting.id))
        elif request.status == "preempted":
            ahead = itertools.takewhile(lambda other: other.passed_over, self.waiting)
            self.waiting.insert(0 if self.profile.preempted_first else len(list(ahead)), request)
        else:
            self.waiting.append(request)

    def _skipped_first(self) -> list[Request]:
        """Until 0.30 requests that were passed over have a queue of their own; a recording lists it first."""
        if self.profile.preempted_first:
            return self.waiting
        return sorted(self.waiting, key=lambda request: not request.passed_over)

    def _admit(self, plan: Plan) -> None:
        """Phase 2: admit from the head of waiting until something does not fit; nobody overtakes.

        Who would bring one adapter too many into the batch is passed over, and stays where it is.
        """
        adapters = {request.lora for request in plan.scheduled} - {0}
        before = self.waiting
        self.waiting = list(before)  # those still to be tried
        try:
            self._admit_heads(plan, adapters)
        finally:
            admitted = {request for request in before if request.status == "running"}
            self.waiting = [request for request in before if request not in admitted]

    def _admit_heads(self, plan: Plan, adapters: set[int]) -> None:
        # Asynchronous: no request here has a token in flight. It would have had to be preempted in this very
        # schedule, and then phase 2 does not take place.
        room = min(self.config.max_num_seqs, self.config.max_num_active_seqs or self.config.max_num_seqs)
        while self.waiting and plan.budget > 0 and len(self.running) < room:
            request = self.waiting[0]
            full = self.config.max_loras is not None and len(adapters) >= self.config.max_loras
            if (full and request.lora and request.lora not in adapters) or not self._may_start(request):
                request.passed_over = True
                self.waiting.pop(0)
                continue
            hits = self._find(request)
            if self.bursts.rates:
                hits = hits[:-1]
            hit_tokens = len(hits) * self.config.block_size
            count = self._capped(len(request.tokens) - hit_tokens, plan)
            if count > plan.budget and not self.config.enable_chunked_prefill:
                return
            count = min(count, plan.budget)
            phantoms = sum(block.phantom for block in hits)
            if not self._allocate(request, count, hits, admission=True):
                return
            self.phantom_hit_blocks += phantoms
            self.waiting.pop(0)
            adapters |= {request.lora} - {0}
            self._start(request, hit_tokens, count, plan)

    def _may_start(self, request: Request) -> bool:  # noqa: ARG002
        """Whether a waiting request may be tried now; else it is passed over."""
        return True

    def _start(self, request: Request, cached: int, count: int, plan: Plan) -> None:
        """It has its blocks: from now on it runs."""
        self.running.append(request)
        (plan.new if request.status == "new" else plan.resumed).append(request)
        request.status = "running"
        request.passed_over = False
        request.computed = cached
        plan.cached[request] = cached
        self._give(request, count, request.table, plan)

    def _find(self, request: Request) -> list[Block]:
        if not request.lora:
            return self.pool.find(request.tokens)
        return self.pool.find(request.tokens, -request.lora)

    # --- blocks of a request ------------------------------------------------------------------------------

    def _allocate(self, request: Request, count: int, hits: list[Block], admission: bool) -> bool:
        """Make room for `count` tokens after those computed and hit. False: no room, and nothing changed."""
        config, pool = self.config, self.pool
        total = request.computed + len(hits) * config.block_size + count
        extra = sum(block.refs == 0 for block in hits)  # in the free list, but about to leave it
        if admission and self.running:
            extra += int(config.watermark * config.num_blocks)
        if admission and config.scheduler_reserve_full_isl:
            whole = max(0, self._blocks_for(len(request.tokens)) - len(request.table) - len(hits))
            if whole + extra > pool.free_count():
                return False
        room = total
        if self.bursts.rates and total == len(
            request.tokens
        ):  # it will sample, and may get its longest burst
            room += min(len(self.bursts.rates) + 1, self._outputs_left(request))
        missing = max(0, self._blocks_for(room) - len(request.table) - len(hits))
        if missing + extra > pool.free_count():
            return False

        if hits:
            pool.take_hits(hits)
            request.table += hits
            request.keyed = len(hits)
        request.table += pool.take_free(missing)
        self._store_full_blocks(request, total)
        return True

    def _store_full_blocks(self, request: Request, total: int) -> None:
        """Key the blocks that `total` tokens fill, as far as those tokens are known."""
        if not self.config.enable_prefix_caching:
            return
        full = min(total, len(request.tokens)) // self.config.block_size
        if full > request.keyed:
            root = -request.lora if request.lora else None
            self.pool.store(request.table, request.tokens, request.keyed, full, root)
            request.keyed = full

    def _outputs_left(self, request: Request) -> int:
        left = self.config.max_model_len - len(request.tokens)
        end = request.max_tokens if request.eos_at is None else min(request.max_tokens, request.eos_at)
        return min(end - request.outputs(), left)

    def _free(self, request: Request) -> None:
        self.pool.release(request.table)
        request.table = []
        request.keyed = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    # --- update -------------------------------------------------------------------------------------------

    def _update(self, plan: Plan) -> list[Request]:
        """Receive the tokens that `plan` sampled; returns the requests that finish, in order."""
        finished = []
        for request in plan.scheduled:
            if request not in plan.samples or request.status == "finished":
                continue
            for _ in range(self.bursts.draw(self._outputs_left(request)) if self.bursts.rates else 1):
                request.tokens.append(output_token(request.index, request.outputs()))
            if self.bursts.rates:
                self._settle_burst(request)
            if request.status == "running":
                self._receive(request)
            if request.has_ended(self.config.max_model_len):
                was_preempted = request.status == "preempted"
                request.status = "finished"
                self._retire(request, was_preempted)
                finished.append(request)
        self.running = [request for request in self.running if request.status != "finished"]
        return finished

    def _retire(self, request: Request, was_preempted: bool) -> None:
        """A request has its last token."""
        self._free(request)
        if was_preempted:
            self.waiting.remove(request)

    def _settle_burst(self, request: Request) -> None:
        """All tokens of a burst but the last are computed; what was reserved in vain goes back."""
        request.computed = len(request.tokens) - 1
        self._store_full_blocks(request, request.computed)
        kept = self._blocks_for(request.computed)
        self.pool.release(request.table[kept:])
        del request.table[kept:]

    def _receive(self, request: Request) -> None:
        """A running request's token has come."""
        if self.config.async_scheduling:
            request.ahead -= 1
            self._store_full_blocks(request, request.computed - request.ahead)

    # --- self-check ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that references, free list and index agree with each other and with the tables."""
        blocks = self.pool.blocks
        refs = Counter(block.id for request in self.running for block in request.table)
        assert not any(request.table for request in self.waiting)
        assert {block.id: block.refs for block in blocks if block.refs} == refs
        assert self.pool.free.keys() == {block.id for block in blocks if not block.refs}
        keyed = {(block.key, block.id) for block in blocks if block.key is not None}
        assert keyed == {(key, block_id) for key, found in self.pool.index.items() for block_id in found}


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.id for request in requests]
