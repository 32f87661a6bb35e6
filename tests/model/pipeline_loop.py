"""vLLM's engine loop with pipeline parallelism, slow and obvious: a queue of batches before stages in a row.

The loop fills its queue before it waits for the oldest batch, and a schedule that finds nothing has its place in it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .clock_loop import ClockLoop
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .vllm_config import Profile
    from .vllm_requests import Plan, Request


class PipelineModel(VllmModel):
    """The scheduler of a pipeline: it knows which requests have tokens in a batch that has not ended."""

    def __init__(self, config: Mapping[str, Any], profile: Profile, stages: int, *, spaced: bool) -> None:
        super().__init__(config, profile)
        self.stages = stages
        self.spaced = spaced
        self.number = 0  # of the schedule
        self.in_flight: Counter[Request] = Counter()
        self.eligible: dict[Request, int] = {}

    def _schedule(self) -> Plan:
        self.number += 1
        plan = super()._schedule()
        for request in plan.scheduled:
            self.in_flight[request] += 1
            if self.spaced and request in plan.samples:
                self.eligible[request] = self.number + self.stages
        return plan

    def _next_tokens(self, request: Request, plan: Plan) -> int:
        if self.number < self.eligible.get(request, 0):
            return 0
        return super()._next_tokens(request, plan)

    def _may_start(self, request: Request) -> bool:
        return not self.in_flight[request]

    def _update(self, plan: Plan) -> list[Request]:
        for request in plan.scheduled:
            self.in_flight[request] -= 1
        return super()._update(plan)


class PipelineLoop(ClockLoop):
    """Plays a scenario on stages of which each takes `(step_ns, per_token_ns)` for a batch."""

    def __init__(self, scenario: Mapping[str, Any], profile: Profile, *, spaced: bool) -> None:
        super().__init__(scenario, profile)
        self.stages: list[tuple[int, int]] = scenario["stages"]
        self.model: PipelineModel = PipelineModel(
            scenario["config"], profile, len(self.stages), spaced=spaced
        )
        self.depth = len(self.stages) + (1 if spaced else 0)
        self.free = [0] * len(self.stages)
        self.token_at: dict[Request, int] = {}
        self.fruitless = 0

    def _schedule(self) -> bool:
        plan = self.model._schedule()
        tokens = {request.id: count for request, count in plan.scheduled.items()}
        ready = self.now
        if tokens:
            ready = max([ready, *(self.token_at.get(request, 0) for request in plan.scheduled)])
            for place, (step_ns, per_token_ns) in enumerate(self.stages):
                ready = max(ready, self.free[place]) + step_ns + per_token_ns * sum(tokens.values())
                self.free[place] = ready
            self.token_at |= dict.fromkeys(plan.samples, ready)
            self.seen.trace.append((0, ready, tokens))
        elif self.queue:
            ready = max(ready, self.queue[-1][1])
        self.queue.append((plan, ready))
        return bool(tokens or plan.preempted)

    def _stands_still(self, *, changed: bool) -> bool:
        # The next schedules may find what this one may not schedule yet.
        self.fruitless = 0 if changed or any(plan.scheduled for plan, _ in self.queue) else self.fruitless + 1
        if self.fruitless <= self.depth + len(self.stages):
            return False
        self.fruitless = 0
        return True
