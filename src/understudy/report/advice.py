"""`Advice`: what replays of remedies showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from understudy.report.replay_budget import describe_limit

if TYPE_CHECKING:
    from understudy.report.trial import Trial
    from understudy.report.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Advice:
    """Replays of remedies, the time they took, and the verdicts that follow."""

    verdicts: tuple[Verdict, ...]
    trials: tuple[Trial, ...]
    seconds: float
    replay_s: float
    """Time of one replay, estimated from the trace and the fleet."""
    limit_s: float
    """Limit of the estimated time of all replays, the same on every machine."""
    untried: int
    """Remedies that were not replayed, because the limit would have been exceeded."""
    smaller_untried: tuple[str, ...] = ()
    """Smaller fleets among them."""

    def __str__(self) -> str:
        """Return the number of replays and their time in one sentence."""
        count = len(self.trials)
        text = f"{count} {'remedy' if count == 1 else 'remedies'} replayed in {self.seconds:.1f} s"
        return f"{text}; {self.untried} not tried: {self.describe_limit()}" if self.untried else text

    def describe_limit(self) -> str:
        """Say what a replay counts as, and the limit of them all."""
        return describe_limit(self.replay_s, self.limit_s)
