"""Plans answers as SGLang's scheduler ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.server.api.plan import Plan
from understudy.server.api.planner import Planner
from understudy.server.sglang.lengths import room_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy.server.api.growing import GrowingPlan
    from understudy.server.api.sampling import Sampling


class SglangPlanner(Planner):
    """Plans the answers of one SGLang worker."""

    def room_for(self, prompt_tokens: int, sampling: Sampling) -> int:
        """Return the most tokens of an answer, as the scheduler limits it. ApiError if the request is too long."""
        room = room_for(prompt_tokens, sampling.asked_tokens, self.worker.settings)
        return 1 if self._prefills else room  # the decode server gives the others

    @property
    def _prefills(self) -> bool:
        push = self.worker.settings.push
        return push is not None and push.prefills

    def plan_one(
        self, tokens: npt.NDArray[np.uint32], sampling: Sampling, index: int, *, empty: bool = False
    ) -> Plan | GrowingPlan:
        """Plan an answer: SGLang's scheduler itself ends it at a stop string."""
        plan = super().plan_one(tokens, sampling, index, empty=empty)
        if not isinstance(plan, Plan):
            return plan
        if self._prefills:  # the scheduler looks at neither stop strings nor ends
            ended = {"finish": "length", "stop_reason": None, "ends_itself": False}
            return msgspec.structs.replace(plan, tokens=plan.tokens[:1], total=1, engine_tokens=1, **ended)
        if plan.stopped:
            plan = msgspec.structs.replace(plan, ends_itself=True)
        if isinstance(plan.stop_reason, int) and not sampling.include_stop:
            pieces = plan.pieces or self.worker.texts.pieces(plan.tokens[: plan.total])
            plan = msgspec.structs.replace(plan, pieces=[*pieces[: plan.total - 1], ""])
        return plan
