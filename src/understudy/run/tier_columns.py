"""What the tiers of a run did, as columns beside those of the timeline."""

# Annotations are evaluated as the class is made: the schema reads them.
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np

from understudy._core import LinkUsage, Tier, TierSummary, TierTotals
from understudy.errors import InvalidArgument
from understudy.run.schema import About, check_columns, refuse, take_columns
from understudy.workload.columns import Int64Column

if TYPE_CHECKING:
    from understudy._core import FleetResult
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

BELOW = (Tier.G2, Tier.G3, Tier.G4)
SHARED = (Tier.G3, Tier.G4)


def name_of(summary: TierSummary) -> str:
    """Its tier, behind the name of its pool where there are several."""
    return f"{summary.pool} {summary.tier.name}".lstrip()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TierColumns:
    """Columns of a run with tiers: a row a request, in workload order, unless said otherwise."""

    below_tokens_first: Annotated[
        tuple[Int64Column, Int64Column, Int64Column],
        About(
            "request",
            "tokens",
            "Of `cached_tokens_first`, those from G2, G3 and G4; the rest was on the device.",
        ),
    ]
    below_tokens_total: Annotated[
        tuple[Int64Column, Int64Column, Int64Column],
        About("request", "tokens", "The same of `cached_tokens_total`."),
    ]
    parked_ns: Annotated[
        Int64Column, About("request", "ns", "How long it was parked while its blocks were brought up.")
    ]
    room_wait_ns: Annotated[
        Int64Column, About("request", "ns", "How long it waited for slots whose bytes were still leaving.")
    ]
    onboard_ns: Annotated[Int64Column, About("load", "ns", "How long a load took that has ended.")]
    sample_held_blocks: Annotated[
        Int64Column,
        About("sample", "blocks", "Of the worker's active blocks, those whose bytes are still leaving."),
    ]
    sample_host_blocks: Annotated[Int64Column, About("sample", "blocks", "Blocks on the worker's host.")]
    tiers: tuple[TierSummary, ...]
    """Each tier at the end, pool by pool, the device first; those of a pool's workers together."""
    totals: TierTotals
    links: tuple[LinkUsage, ...]
    """Every link, until all transfers had ended."""

    @classmethod
    def of(cls, result: "FleetResult", workload: "Workload", order: Int64Column | None) -> "TierColumns":
        """Take them from a run of the core, as `Timeline.of` does."""
        return cls(
            **take_columns(cls, result, workload, order),
            tiers=tuple(sorted(result.tiers, key=lambda summary: (summary.first_worker, int(summary.tier)))),
            totals=result.tier_totals,
            links=tuple(result.links),
        )

    def __post_init__(self) -> None:
        check_columns(self)

    def workers_of(self, summary: TierSummary, num_workers: int) -> range:
        """The workers of its pool, in a run of so many."""
        firsts = {other.first_worker for other in self.tiers if other.first_worker > summary.first_worker}
        return range(summary.first_worker, min(firsts, default=num_workers))

    def pool_of(self, worker: int) -> str:
        """The name of its pool, which has tiers; empty where there is one pool only."""
        of_pool = max((s for s in self.tiers if s.first_worker <= worker), key=lambda s: s.first_worker)
        return of_pool.pool

    def check(self, timeline: "Timeline") -> None:
        """Raise RowError or InvalidArgument where they do not fit the timeline."""
        if len(self.parked_ns) != len(timeline):
            raise InvalidArgument(f"parked_ns has {len(self.parked_ns)} rows for {len(timeline)} requests")
        if len(self.sample_held_blocks) != len(timeline.sample_time_ns):
            raise InvalidArgument("sample_held_blocks has another number of rows than sample_time_ns")
        for name, below, cached in (
            ("below_tokens_first", self.below_tokens_first, timeline.cached_tokens_first),
            ("below_tokens_total", self.below_tokens_total, timeline.cached_tokens_total),
        ):
            refuse(name, (np.minimum.reduce(below) < 0), "must not be negative")
            refuse(name, sum(below) > cached, "is more than was cached")
        for name in ("parked_ns", "room_wait_ns", "onboard_ns", "sample_host_blocks"):
            refuse(name, getattr(self, name) < 0, "must not be negative")
        held = self.sample_held_blocks
        refuse(
            "sample_held_blocks", (held < 0) | (held > timeline.sample_used_blocks), "is not of the active"
        )
