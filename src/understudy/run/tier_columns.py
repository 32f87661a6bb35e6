"""Columns of a run's tiers, in addition to those of the timeline."""

# Annotations are evaluated when the class is created, because the schema reads them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from understudy._core import LinkUsage, Tier, TierSummary, TierTotals
from understudy.errors import InvalidArgument
from understudy.run.schema import About, check_columns, refuse, take_columns
from understudy.workload.columns import Int32Column, Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult
    from understudy.workload import Workload

BELOW = (Tier.G2, Tier.G3, Tier.G4)
SHARED = (Tier.G3, Tier.G4)


def name_tier(summary: TierSummary) -> str:
    """Return the tier's name, with its pool's name as prefix where there are several."""
    return f"{summary.pool} {summary.tier.name}".lstrip()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TierColumns:
    """Columns of a run with tiers, one row per request in workload order unless stated otherwise."""

    below_tokens_first: Annotated[
        tuple[Int64Column, Int64Column, Int64Column],
        About(
            "request",
            "tokens",
            "Part of `cached_tokens_first` that came from G2, G3 and G4; the rest was on the device.",
        ),
    ]
    below_tokens_total: Annotated[
        tuple[Int64Column, Int64Column, Int64Column],
        About("request", "tokens", "Part of `cached_tokens_total` that came from G2, G3 and G4."),
    ]
    parked_ns: Annotated[
        Int64Column, About("request", "ns", "Time that the request was parked while its blocks were loaded.")
    ]
    room_wait_ns: Annotated[
        Int64Column,
        About("request", "ns", "Time that the request waited for slots that were still being offloaded."),
    ]
    onboard_ns: Annotated[Int64Column, About("load", "ns", "Duration of a finished load.")]
    sample_held_blocks: Annotated[
        Int64Column,
        About("sample", "blocks", "Active blocks of the worker that are still being offloaded."),
    ]
    sample_host_blocks: Annotated[Int64Column, About("sample", "blocks", "Blocks on the worker's host.")]
    tiers: tuple[TierSummary, ...]
    """Tiers at the end of the run by pool, the device first; workers of a pool are combined."""
    totals: TierTotals
    links: tuple[LinkUsage, ...]
    """Usage of every link until all transfers had ended."""

    @classmethod
    def from_result(
        cls, result: "FleetResult", workload: "Workload", order: Int64Column | None
    ) -> "TierColumns":
        """Convert a result of the core, as `Timeline.from_result` does."""
        return cls(
            **take_columns(cls, result, workload, order),
            tiers=tuple(sorted(result.tiers, key=lambda summary: (summary.first_worker, int(summary.tier)))),
            totals=result.tier_totals,
            links=tuple(result.links),
        )

    def __post_init__(self) -> None:
        check_columns(self)

    def workers_of(self, summary: TierSummary, num_workers: int) -> range:
        """Return the workers of the tier's pool."""
        firsts = {other.first_worker for other in self.tiers if other.first_worker > summary.first_worker}
        return range(summary.first_worker, min(firsts, default=num_workers))

    def pool_of(self, worker: int) -> str:
        """Return the name of the worker's pool, which has tiers; empty if there is one pool."""
        of_pool = max((s for s in self.tiers if s.first_worker <= worker), key=lambda s: s.first_worker)
        return of_pool.pool

    def check(
        self,
        cached_tokens_first: Int32Column,
        cached_tokens_total: Int64Column,
        sample_used_blocks: Int64Column,
    ) -> None:
        """Raise RowError or InvalidArgument where they do not fit these columns of the timeline."""
        requests, samples = len(cached_tokens_first), len(sample_used_blocks)
        if len(self.parked_ns) != requests:
            raise InvalidArgument(f"parked_ns has {len(self.parked_ns)} rows for {requests} requests")
        if len(self.sample_held_blocks) != samples:
            raise InvalidArgument("sample_held_blocks and sample_time_ns have different numbers of rows")
        for name, below, cached in (
            ("below_tokens_first", self.below_tokens_first, cached_tokens_first),
            ("below_tokens_total", self.below_tokens_total, cached_tokens_total),
        ):
            refuse(name, (np.minimum.reduce(below) < 0), "must not be negative")
            refuse(name, sum(below) > cached, "is more than was cached")
        for name in ("parked_ns", "room_wait_ns", "onboard_ns", "sample_host_blocks"):
            refuse(name, getattr(self, name) < 0, "must not be negative")
        held = self.sample_held_blocks
        refuse(
            "sample_held_blocks",
            (held < 0) | (held > sample_used_blocks),
            "is more than the active blocks",
        )
