"""The scheduler model with vLLM's speculative decoding, synchronous or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .vllm_config import Config
from .vllm_format import output_token
from .vllm_requests import Plan, Request
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .vllm_blocks import Block
    from .vllm_config import Profile


@dataclass(eq=False)
class Drafting:
    """What speculation adds to a request."""

    accept: list[int]
    waiting: int = 0  # drafts to be verified by its next turn
    prefilling: bool = False


@dataclass(eq=False)
class SpecPlan(Plan):
    """A schedule, and the drafts that it verifies; those of padded requests are blank and never right."""

    drafts: dict[Request, int] = field(default_factory=dict)
    padded: set[Request] = field(default_factory=set)


class SpecModel(VllmModel):
    """The scheduler with `k` drafts a step; `method` is mtp (eagle-like) or ngram."""

    def __init__(self, config: Mapping[str, Any], profile: Profile, method: str, k: int) -> None:
        super().__init__(Config.parse(config, profile), profile)
        self.k = k
        self.eagle = method == "mtp"
        self.drafting: dict[Request, Drafting] = {}
        self.emitted: dict[str, int] = {}

    def track(self, request_id: str, accept: list[int]) -> None:
        """Say how many drafts of a request that was just added are accepted."""
        (request,) = [r for r in self.waiting if r.id == request_id]
        self.drafting[request] = Drafting(accept)

    def _schedule(self) -> Plan:
        plan = SpecPlan(budget=self.config.max_num_batched_tokens, prefill_cap=self._prefill_cap())
        self._schedule_running(plan)
        # Undone turns lose their drafts.
        plan.drafts = {r: self._drafts_of(r, n) for r, n in plan.scheduled.items()}
        for request in plan.scheduled:
            self.drafting[request].waiting = 0
        if not plan.preempted:
            self._admit(plan)
        for request, count in plan.scheduled.items():
            request.computed += count
            drafting = self.drafting[request]
            drafting.prefilling = request.computed < len(request.tokens) + request.ahead
            if drafting.prefilling:
                continue
            plan.samples.add(request)
            if self.config.async_scheduling:
                request.ahead += 1 + plan.drafts.get(request, 0)
                drafting.waiting = self.k
        return plan

    def _drafts_of(self, request: Request, count: int) -> int:
        return max(0, request.computed + count - len(request.tokens) - request.ahead)

    def _next_tokens(self, request: Request, plan: Plan) -> int:
        if request.ahead > 0 and (
            request.computed + 2 - request.ahead >= request.prompt_tokens + request.max_tokens
        ):
            return 0
        known = len(request.tokens) + self.drafting[request].waiting + request.ahead
        room = self.config.max_model_len - request.computed - 1
        return max(0, min(self._capped(known - request.computed, plan), plan.budget, room))

    def _preempt(self, victim: Request, plan: Plan) -> None:
        super()._preempt(victim, plan)
        self.drafting[victim].waiting = 0

    def _admit(self, plan: Plan) -> None:
        assert isinstance(plan, SpecPlan)
        decodes_only = bool(plan.scheduled) and not any(self.drafting[r].prefilling for r in plan.scheduled)
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hits = self.pool.find(request.tokens)
            if self.eagle:
                hits = hits[:-1]
            hit_tokens = len(hits) * self.config.block_size
            count = len(request.tokens) - hit_tokens
            padded = decodes_only and count == 1
            if padded:
                count = 1 + self.k
                if count > plan.budget or hit_tokens + count > self.config.max_model_len:
                    return
            count = self._capped(count, plan)
            if count > plan.budget and not self.config.enable_chunked_prefill:
                return
            count = min(count, plan.budget)
            if not self._allocate(request, count, hits, admission=True):
                return
            self.waiting.pop(0)
            self._start(request, hit_tokens, count, plan)
            if padded:
                plan.padded.add(request)
                plan.drafts[request] = count - 1

    def _allocate(self, request: Request, count: int, hits: list[Block], admission: bool) -> bool:
        """The drafter of an eagle-like method writes `k` positions beyond what is scheduled."""
        config, pool = self.config, self.pool
        total = request.computed + len(hits) * config.block_size + count
        extra = sum(block.refs == 0 for block in hits)
        if admission and self.running:
            extra += int(config.watermark * config.num_blocks)
        if admission and config.scheduler_reserve_full_isl:
            whole = max(0, self._blocks_for(len(request.tokens)) - len(hits))
            if whole + extra > pool.free_count():
                return False
        room = min(total + (self.k if self.eagle else 0), config.max_model_len)
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

    def _update(self, plan: Plan) -> list[Request]:
        assert isinstance(plan, SpecPlan)
        self.emitted = {}
        finished = []
        for request in plan.scheduled:
            if request not in plan.samples or request.status == "finished":
                continue
            drafting = self.drafting[request]
            drafts = plan.drafts.get(request, 0)
            right = drafting.accept[request.outputs() % len(drafting.accept)]
            accepted = 0 if request in plan.padded else min(right, drafts)
            running = request.status == "running"
            if running:
                request.computed -= drafts - accepted
                if self.config.async_scheduling:
                    request.ahead -= drafts - accepted
            before = request.outputs()
            for _ in range(1 + accepted):
                request.tokens.append(output_token(request.index, request.outputs()))
                if running and self.config.async_scheduling:
                    request.ahead -= 1
                if request.has_ended(self.config.max_model_len):
                    break
            self.emitted[request.id] = request.outputs() - before
            if running and self.config.async_scheduling:
                self._store_full_blocks(request, request.computed - request.ahead)
            elif running:
                drafting.waiting = self.k
            if request.has_ended(self.config.max_model_len):
                self._free(request)
                if request.status == "preempted":
                    self.waiting.remove(request)
                request.status = "finished"
                finished.append(request)
        self.running = [request for request in self.running if request.status != "finished"]
        return finished


def run_spec_scenario(scenario: Mapping[str, Any], profile: Profile) -> Iterator[dict[str, Any]]:
    """The lines of a recording with speculation, one a step."""
    model = SpecModel(scenario["config"], profile, scenario["method"], scenario["k"])
    to_come = list(enumerate(scenario["requests"]))
    finished = 0
    for step in range(scenario["max_steps"]):
        for index, request in to_come:
            if request["arrival_step"] <= step:
                model.add(request, index)
                model.track(request["id"], request["accept"])
        to_come = [entry for entry in to_come if entry[1]["arrival_step"] > step]
        plan = model._schedule()
        assert isinstance(plan, SpecPlan)
        free_after_schedule = model.pool.free_count()
        received: Plan | None = plan
        if model.config.async_scheduling:
            received, model._unreceived = model._unreceived, plan
        model.emitted = {}
        if received is not None:
            finished += len(model._update(received))
        yield {
            "step": step,
            "scheduled": {r.id: count for r, count in plan.scheduled.items()},
            "drafts": {r.id: plan.drafts[r] for r in plan.scheduled if plan.drafts.get(r)},
            "cached": {r.id: plan.cached[r] for r in plan.new},
            "emitted": model.emitted,
            "running": [r.id for r in model.running],
            "waiting": len(model.waiting),
            "free_after_schedule": free_after_schedule,
            "free_blocks": model.pool.free_count(),
        }
        if finished == len(scenario["requests"]):
            return
