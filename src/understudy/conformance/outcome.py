"""The result of comparing a run with its recording."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line in which a run differs from its recording."""

    where: str
    values: tuple[tuple[str, object, object], ...] = ()
    """(key, ours, recorded) for each key of the line with a difference."""
    reason: str = ""
    """Explanation instead of values, when there is nothing to compare."""

    def __str__(self) -> str:
        """Format the first differing key in one line."""
        if not self.values:
            return f"{self.where}: {self.reason}" if self.where else self.reason
        key, ours, recorded = self.values[0]
        return f"{self.where}: {key} is {json.dumps(ours)}, recorded {json.dumps(recorded)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of comparing one scenario. `difference` is None when every step was identical."""

    name: str
    steps: int
    difference: Difference | None
    version: str = ""
    """The recorded vLLM version."""
    profile: str = ""
    """The version profile of the simulated engine."""
    note: str = ""
    """A remark without a difference: that the release stops making progress, and why."""
