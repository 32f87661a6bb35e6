"""`Verdict`: a problem that a rule found in a report, and what its rules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.run.facts import PoolFacts, RunFacts


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


def compute_queue_share(report: ReportData) -> float:
    """Return the mean time in queues divided by the mean E2E; 0 without completed requests."""
    return report.queue_ms.mean / report.e2e_ms.mean if report.e2e_ms.mean > 0 else 0.0


def list_pools(report: ReportData) -> tuple[PoolFacts | RunFacts, ...]:
    """Return the settings of each pool; those of the run if it has no pools."""
    return report.run.pools or (report.run,)
