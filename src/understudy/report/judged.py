"""`JudgedReport`: the metrics of a run with the verdicts on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from understudy.report.data import ReportData

if TYPE_CHECKING:
    from understudy.report.advice import Advice
    from understudy.report.verdict import Verdict


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedReport(ReportData):
    """Metrics of a run with its verdicts. Tables and pages show them; `Report` writes these."""

    advice: Advice | None = None
    """Replayed remedies (`understudy.report.advise.advise`); None if none was replayed."""

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Findings with remedies, the most important first; empty if no rule applies."""
        from understudy.report.verdicts import find_verdicts

        return find_verdicts(self) if self.advice is None else self.advice.verdicts
