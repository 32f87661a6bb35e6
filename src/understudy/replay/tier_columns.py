"""What the tiers of a run did, as columns beside those of the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy._core import Tier
from understudy.errors import InvalidArgument
from understudy.workload.columns import Int64Column, RowError, column, first_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import FleetResult, LinkUsage, TierSummary, TierTotals
    from understudy.replay.timeline import Timeline

BELOW = (Tier.G2, Tier.G3, Tier.G4)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TierColumns:
    """Columns of a run with tiers: a row a request, in workload order, unless said otherwise."""

    below_tokens_first: tuple[Int64Column, Int64Column, Int64Column]
    """Of `cached_tokens_first`, those from G2, G3 and G4; the rest was on the device."""
    below_tokens_total: tuple[Int64Column, Int64Column, Int64Column]
    """The same of `cached_tokens_total`."""
    parked_ns: Int64Column
    """How long the request was parked while its blocks were brought up."""
    room_wait_ns: Int64Column
    """How long it waited for slots whose bytes were still leaving."""
    onboard_ns: Int64Column
    """How long a load took: a row for each that ended."""
    sample_held_blocks: Int64Column
    """A row a sample: of the worker's active blocks, those whose bytes are still leaving."""
    sample_host_blocks: Int64Column
    """A row a sample: blocks on the worker's host."""
    tiers: tuple[TierSummary, ...]
    """Each tier at the end, the device first; those of the workers together."""
    totals: TierTotals
    links: tuple[LinkUsage, ...]
    """Every link, until all transfers had ended."""

    @classmethod
    def of(cls, result: FleetResult, own: Callable[[Int64Column], Int64Column]) -> TierColumns:
        """Take them from a run of the core; `own` puts a request column into the workload's order."""
        g2_first, g3_first, g4_first = map(own, result.below_tokens_first)
        g2_total, g3_total, g4_total = map(own, result.below_tokens_total)
        return cls(
            below_tokens_first=(g2_first, g3_first, g4_first),
            below_tokens_total=(g2_total, g3_total, g4_total),
            parked_ns=own(result.parked_ns),
            room_wait_ns=own(result.room_wait_ns),
            onboard_ns=result.onboard_ns,
            sample_held_blocks=result.sample_held_blocks.astype(np.int64),
            sample_host_blocks=result.sample_host_blocks.astype(np.int64),
            tiers=tuple(sorted(result.tiers, key=lambda summary: int(summary.tier))),
            totals=result.tier_totals,
            links=tuple(result.links),
        )

    def __post_init__(self) -> None:
        rows, samples = len(self.parked_ns), len(self.sample_held_blocks)
        for name in ("below_tokens_first", "below_tokens_total"):
            columns = tuple(column(name, one, np.int64, rows) for one in getattr(self, name))
            if len(columns) != len(BELOW):
                raise InvalidArgument(f"{name} needs a column for each of G2, G3 and G4")
            object.__setattr__(self, name, columns)
        for name, length in (
            ("parked_ns", rows),
            ("room_wait_ns", rows),
            ("onboard_ns", None),
            ("sample_held_blocks", samples),
            ("sample_host_blocks", samples),
        ):
            object.__setattr__(self, name, column(name, getattr(self, name), np.int64, length))

    def request_columns(self) -> tuple[Int64Column, ...]:
        """The columns with a row a request, in a fixed order."""
        return (*self.below_tokens_first, *self.below_tokens_total, self.parked_ns, self.room_wait_ns)

    def check(self, timeline: Timeline) -> None:
        """Raise RowError or InvalidArgument where they do not fit the timeline."""
        if len(self.parked_ns) != len(timeline):
            raise InvalidArgument(f"parked_ns has {len(self.parked_ns)} rows for {len(timeline)} requests")
        if len(self.sample_held_blocks) != len(timeline.sample_time_ns):
            raise InvalidArgument("sample_held_blocks has another number of rows than sample_time_ns")
        for name, below, cached in (
            ("below_tokens_first", self.below_tokens_first, timeline.cached_tokens_first),
            ("below_tokens_total", self.below_tokens_total, timeline.cached_tokens_total),
        ):
            _refuse(name, (np.minimum.reduce(below) < 0), "must not be negative")
            _refuse(name, sum(below) > cached, "is more than was cached")
        for name in ("parked_ns", "room_wait_ns", "onboard_ns", "sample_host_blocks"):
            _refuse(name, getattr(self, name) < 0, "must not be negative")
        held = self.sample_held_blocks
        _refuse(
            "sample_held_blocks", (held < 0) | (held > timeline.sample_used_blocks), "is not of the active"
        )


def _refuse(name: str, bad: object, reason: str) -> None:
    row = first_row(np.asarray(bad))
    if row is not None:
        raise RowError(name, row, reason)
