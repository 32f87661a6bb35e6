"""Advice of `understudy replay`: the remedies of its verdicts, replayed."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from understudy.api import replay
from understudy.cli.run_flags import read_settings
from understudy.cli.slo import read_slo
from understudy.errors import ConfigError
from understudy.report.advise import advise
from understudy.report.remedies import Change, Setup
from understudy.run.options import Execution
from understudy.tiers.plan import TierPlan

if TYPE_CHECKING:
    import argparse

    from understudy.report import Report
    from understudy.run.settings import ReplaySettings
    from understudy.tiers.settings import TiersConfig
    from understudy.workload import Workload

_HOST_FACTOR = 4
"""Host memory to try, divided by a worker's KV memory."""


def try_remedies(
    report: Report, settings: ReplaySettings, workload: Workload, args: argparse.Namespace
) -> Report:
    """Replay the remedies of the verdicts; nothing is written by those replays."""

    def replay_with(changes: dict[str, Any]) -> Report:
        engine = {
            name: value
            for name, value in changes.items()
            if name not in ("workers", "pools", "routing", "load", "tiers", "disaggregation")
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
            tiers=None if pools else changes.get("tiers", settings.tiers),
            slo=read_slo(args),
            ranks=settings.ranks,
            disaggregation=changes.get("disaggregation", settings.disaggregation),
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
        disaggregation=settings.disaggregation,
        host=_find_host(settings, args),
    )
    return advise(report, setup, replay_with)


def _find_host(settings: ReplaySettings, args: argparse.Namespace) -> Change | None:
    """Return host memory of four times a worker's KV memory; None if the run has tiers or would refuse them."""
    if settings.pools or settings.tiers.tiers or settings.disaggregation is not None:
        return None
    engine = settings.engine
    try:
        plan = TierPlan.of(_read_tiers(args, g2=str(engine.num_gpu_blocks)), engine.block_size)
        assert plan is not None
        size = _HOST_FACTOR * engine.num_gpu_blocks * plan.block_bytes
        unit, name = (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")
        shown = f"{math.ceil(size / unit)}{name}"
        return Change(f"--g2-bytes {shown}", {"tiers": _read_tiers(args, g2_bytes=shown)})
    except ConfigError:  # such as an unknown KV size
        return None


def _read_tiers(args: argparse.Namespace, **flags: str) -> TiersConfig:
    return read_settings(Namespace(**{**vars(args), **flags})).tiers
