"""`Verdict`: a problem that a rule found in a report, and what its rules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.report.report import Report
    from understudy.run.facts import PoolFacts, RunFacts

MIN_REQUESTS = 20
"""Fewer requests are too few for shares."""
KV_FULL = 0.95
"""KV usage from which requests may wait for blocks."""
LONG_QUEUE = 0.1
"""Share of the E2E time in queues that is a finding: runs with room to spare spend a few percent there or less."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A problem: the `rule` that found it, the `finding` with its numbers, and a `remedy`."""

    rule: str
    """Name of the rule, such as cache_too_small."""
    finding: str
    """The problem with its numbers, in one sentence."""
    remedy: str
    """Recommended change."""

    def __str__(self) -> str:
        return f"{self.finding} {self.remedy}"


def compute_queue_share(report: Report) -> float:
    """Return the mean time in queues divided by the mean E2E; 0 without completed requests."""
    return report.queue_ms.mean / report.e2e_ms.mean if report.e2e_ms.mean > 0 else 0.0


def list_pools(report: Report) -> tuple[PoolFacts | RunFacts, ...]:
    """Return the settings of each pool; those of the run if it has no pools."""
    return report.run.pools or (report.run,)


def has_kv_groups(report: Report) -> bool:
    """Whether an engine has KV cache groups, so that bounds for one group of full attention do not apply."""
    return any(pool.engine.get("kv_cache_groups") for pool in list_pools(report))
