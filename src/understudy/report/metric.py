"""One number of a report, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one distribution, of a report. `key` is its dotted path in Report and in the JSON."""

    key: str
    name: str
    unit: str
    definition: str
