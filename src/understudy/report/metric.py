"""`Metric`: the name, unit and definition of one number of a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """Description of one number or distribution. `key` is its dotted path in Report and in the JSON."""

    key: str
    name: str
    unit: str
    definition: str
