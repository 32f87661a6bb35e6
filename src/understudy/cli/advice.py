"""Advice of `understudy replay`: the remedies of its verdicts, replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from understudy.api import replay
from understudy.cli.replay_modes import read_slo
from understudy.report.advice import advise
from understudy.report.remedies import Setup
from understudy.run.options import Execution

if TYPE_CHECKING:
    import argparse

    from understudy.report import Report
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload


def try_remedies(
    report: Report, settings: ReplaySettings, workload: Workload, args: argparse.Namespace
) -> Report:
    """Replay the remedies of the verdicts; nothing is written by those replays."""

    def replay_with(changes: dict[str, Any]) -> Report:
        engine = {
            name: value
            for name, value in changes.items()
            if name not in ("workers", "pools", "routing", "load")
        }
        pools = changes.get("pools", settings.pools)
        return replay(
            workload,
            None if pools else replace(settings.engine, **engine),
            workers=changes.get("workers", settings.workers),
            pools=pools,
            routing=changes.get("routing", settings.policy),
            seed=settings.seed,
            load=changes.get("load", settings.load),
            max_tokens=args.max_tokens,
            tiers=None if pools else settings.tiers,
            slo=read_slo(args),
            ranks=settings.ranks,
            disaggregation=settings.disaggregation,
            execution=Execution(threads=args.threads, fast_forward=not args.no_fast_forward),
        )

    setup = Setup(
        workers=settings.workers,
        routing=settings.router or settings.routing,
        load=settings.load,
        engine=settings.engine,
        can_add_blocks=settings.gpu is None or args.num_gpu_blocks is not None,
        has_sessions=workload.sessions < len(workload),
        pools=settings.pools,
    )
    return advise(report, setup, replay_with)
