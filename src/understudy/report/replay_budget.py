"""Limit replays of remedies by their work, so that equal inputs give equal verdicts on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from understudy.kv.policy import BUILT_IN_POLICIES
from understudy.report.latency import NS_PER_S
from understudy.report.verdict import list_pools
from understudy.router.kv import KvRouting
from understudy.run.routing_choice import Routing
from understudy.text import duration

if TYPE_CHECKING:
    from understudy.report.data import ReportData

LIMIT_S = 10.0
"""Default limit of the estimated time of all replays, in s."""
_REQUEST_NS, _BLOCK_NS, _TOKEN_NS = 40_000, 500, 600
"""Time of a request, of a block of its prompt and of an output token on a slow core: 2 to 4 times a fast one's."""
_LEAST_BLOCK = 16
"""Smaller blocks than these cost as much together: SGLang's tree holds runs of tokens."""
_PYTHON = 16
"""Factor of a fleet that calls a router, a policy or step times written in Python."""


def estimate_replay_s(report: ReportData) -> float:
    """Estimate the s that another replay of a run takes on a slow core, from its trace and fleet alone."""
    timeline = report.columns
    blocks = int(timeline.prompt_tokens.sum(dtype="int64")) / max(timeline.block_size, _LEAST_BLOCK)
    tokens = int(timeline.requested_output_tokens.sum(dtype="int64"))
    work_ns = _REQUEST_NS * len(timeline) + _BLOCK_NS * blocks + _TOKEN_NS * tokens
    return work_ns * (_PYTHON if _calls_python(report) else 1) / NS_PER_S


def _calls_python(report: ReportData) -> bool:
    run = report.run
    routings = (None, *get_args(Routing))
    policies = (None, *BUILT_IN_POLICIES)
    return (
        run.timing is not None
        or not (isinstance(run.routing, KvRouting) or run.routing in routings)
        or any(pool.engine.get("eviction_policy") not in policies for pool in list_pools(report))
    )


class ReplayBudget:
    """Replays that fit the limit, each of which counts as long as the run's trace and fleet make it."""

    def __init__(self, report: ReportData, limit_s: float) -> None:
        self.limit_s = limit_s
        self.replay_s = estimate_replay_s(report)
        self._spent_s = 0.0

    def take(self) -> bool:
        """Count a replay; False if it would exceed the limit."""
        if self._spent_s + self.replay_s > self.limit_s:
            return False
        self._spent_s += self.replay_s
        return True

    def describe(self) -> str:
        """Say what a replay counts as, and the limit of them all."""
        return describe_limit(self.replay_s, self.limit_s)


def describe_limit(replay_s: float, limit_s: float) -> str:
    """Say what a replay counts as, and the limit."""
    counts = f"by the size of its trace, a replay counts as {duration(replay_s)}"
    return f"{counts}, and the limit is {limit_s:g} s"
