"""What faults did to a run: the requests that each hurt, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.latency import NS_PER_S
from understudy.run.losses import DRAINED, Outcome

if TYPE_CHECKING:
    from understudy.run.facts import RunFacts
    from understudy.run.losses import RequestLosses
    from understudy.run.timeline import Timeline
    from understudy.workload.columns import BoolColumn

SHOWN = 8
"""Faults of which a report on a terminal has a line each; those that hurt most."""


@dataclass(frozen=True, slots=True)
class FaultEffect:
    """One fault of the plan. Times in s from the run's start."""

    fault: str
    """As `--fault` reads it."""
    began_s: float | None
    """None: it found nothing to fail."""
    ended_s: float | None
    failed: int
    retried: int
    migrated: int
    lost_tokens: int
    """Output tokens that were made in vain: those of requests that failed or started anew."""
    in_flight: int
    """Requests that were in flight while it lasted; a fault without losses hurts these at most."""
    recovered_s: float | None
    """Time from its begin until the last request that lost a worker to it had ended; None: it lost none."""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """Faults of a run, and the requests that lost their worker."""

    faults: tuple[FaultEffect, ...]
    lost: int
    """Requests that lost a worker, each counted once."""
    failed: int
    retried: int
    migrated: int
    handed_back: int
    """Losses to drains that took too long."""
    lost_tokens: int

    @classmethod
    def of(cls, timeline: Timeline, run: RunFacts) -> FaultReport | None:
        """Compute it; None for a run without faults."""
        losses = timeline.losses
        if losses is None:
            return None
        named = [str(name) for name in run.faults.get("faults", ())]
        named += ["?"] * (len(losses.fault_began_ns) - len(named))
        outcome = losses.loss_outcome
        return cls(
            faults=tuple(_describe(timeline, losses, number, name) for number, name in enumerate(named)),
            lost=len(np.unique(losses.loss_request)),
            failed=int((outcome == Outcome.FAILED).sum()),
            retried=int((outcome == Outcome.RETRIED).sum()),
            migrated=int((outcome == Outcome.MIGRATED).sum()),
            handed_back=int((losses.loss_fault == DRAINED).sum()),
            lost_tokens=_count_lost_tokens(losses, np.ones(len(outcome), np.bool_)),
        )


def _describe(timeline: Timeline, losses: RequestLosses, number: int, name: str) -> FaultEffect:
    mine = losses.of_fault(number)
    began, ended = int(losses.fault_began_ns[number]), int(losses.fault_ended_ns[number])
    until = ended if ended >= 0 else timeline.end_ns
    arrived = timeline.arrival_ns
    alive = (arrived >= 0) & (arrived <= until) & (timeline.finish_ns >= began)
    rows = losses.loss_request[mine]
    outcome = losses.loss_outcome[mine]
    return FaultEffect(
        fault=name,
        began_s=None if began < 0 else began / NS_PER_S,
        ended_s=None if ended < 0 else ended / NS_PER_S,
        failed=int((outcome == Outcome.FAILED).sum()),
        retried=int((outcome == Outcome.RETRIED).sum()),
        migrated=int((outcome == Outcome.MIGRATED).sum()),
        lost_tokens=_count_lost_tokens(losses, mine),
        in_flight=0 if began < 0 else int(alive.sum()),
        recovered_s=(int(timeline.finish_ns[rows].max()) - began) / NS_PER_S if len(rows) else None,
    )


def _count_lost_tokens(losses: RequestLosses, which: BoolColumn) -> int:
    vain = which & (losses.loss_outcome != Outcome.MIGRATED)
    return int(losses.loss_tokens[vain].sum(dtype=np.int64))


def describe_faults(report: FaultReport) -> str:
    """Describe the losses in one line, and the worst faults in one each."""
    began = [one for one in report.faults if one.began_s is not None]
    drains = f", {report.handed_back:,} of them to drains" if report.handed_back else ""
    lines = [
        f"{len(began):,} of {len(report.faults):,} took effect; {report.lost:,} requests lost a worker{drains}: "
        f"{report.retried:,} started anew, {report.migrated:,} went on elsewhere, {report.failed:,} failed; "
        f"{report.lost_tokens:,} output tokens in vain"
    ]
    worst = sorted(began, key=lambda one: (-one.failed, -one.retried - one.migrated, one.began_s or 0.0))
    lines += [_describe_line(one) for one in worst[:SHOWN]]
    if len(worst) > SHOWN:
        lines.append(f"… and {len(worst) - SHOWN:,} more (--json)")
    return "\n".join(lines)


def _describe_line(one: FaultEffect) -> str:
    hurt = one.failed + one.retried + one.migrated
    if not hurt:
        return f"{one.fault}: no request lost a worker, {one.in_flight:,} were in flight"
    return (
        f"{one.fault}: {hurt:,} requests lost a worker ({one.retried:,} anew, {one.migrated:,} went on, "
        f"{one.failed:,} failed); all had ended {one.recovered_s:.1f} s after its begin"
    )
