"""`Verdict`: a problem that a rule found in a report, and what its rules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.report.report import Report
    from understudy.run.facts import PoolFacts, RunFacts

MIN_REQUESTS = 20
"""Fewer requests are too few for shares."""


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


def list_pools(report: Report) -> tuple[PoolFacts | RunFacts, ...]:
    """Return the settings of each pool; those of the run if it has no pools."""
    return report.run.pools or (report.run,)
