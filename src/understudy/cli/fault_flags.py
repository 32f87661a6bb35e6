"""Flags of faults during a replay, and of what becomes of requests that lose their worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from understudy.run.autoscale import Autoscale
    from understudy.run.faults import Fault, FaultPlan, Kind
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload

EXAMPLES = """\
  understudy replay trace.jsonl --workers 4 --fault kill:2@600s+30s --on-loss migrate
  understudy replay trace.jsonl --workers 8 --routing kv --chaos 1 --chaos-rate 60 --check
"""


def add_fault_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of faults."""
    group = verb.add_argument_group("faults")
    group.add_argument(
        "--faults", type=Path, metavar="FILE", help="faults, one a line: as --fault, or as JSON"
    )
    group.add_argument(
        "--fault",
        action="append",
        metavar="KIND[:WORKER]@TIME[+DURATION][,FIELD=VALUE…]",
        help="one fault, such as kill:2@600s+30s (repeatable); kinds: docs/elastic.md",
    )
    group.add_argument("--chaos", type=int, metavar="SEED", help="draw faults at random times, by seed")
    group.add_argument(
        "--chaos-rate", type=float, metavar="X", help="with --chaos: faults per hour of the run (default: 60)"
    )
    group.add_argument(
        "--chaos-kinds",
        metavar="KIND[,KIND…]",
        help="with --chaos: kinds (default: all that the fleet can have)",
    )
    group.add_argument(
        "--on-loss",
        choices=("fail", "retry", "migrate"),
        help="a request that loses its worker fails, starts anew elsewhere (the default), or goes on elsewhere with "
        "its tokens so far",
    )
    group.add_argument(
        "--retry-delay-ms",
        type=float,
        metavar="X",
        help="time until a lost request is routed again (default: 0)",
    )
    group.add_argument(
        "--max-attempts", type=int, metavar="N", help="a request fails that has lost its worker N times"
    )
    group.add_argument(
        "--drain-limit-s",
        type=float,
        metavar="S",
        help="with --autoscale: a worker that has drained for so long hands back its requests (default: it ends them)",
    )


def read_faults(
    args: argparse.Namespace, settings: ReplaySettings, workload: Workload, autoscale: Autoscale | None
) -> FaultPlan | None:
    """Return the plan that the flags give, if any. ConfigError names a flag that is wrong or has no effect."""
    from understudy.errors import ConfigError
    from understudy.run.faults import FaultPlan, parse_fault, read_fault_file

    policy: dict[str, Any] = {
        name: value
        for name in ("on_loss", "retry_delay_ms", "max_attempts", "drain_limit_s")
        if (value := getattr(args, name)) is not None
    }
    faults: tuple[Fault, ...] = () if args.faults is None else read_fault_file(args.faults)
    faults += tuple(parse_fault(text, field="--fault") for text in args.fault or ())
    if args.chaos is not None:
        faults += _draw(args, settings, workload)
    for name in ("chaos_rate", "chaos_kinds"):
        if getattr(args, name) is not None and args.chaos is None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --chaos; give a seed")
    if not faults and args.chaos is None and "drain_limit_s" not in policy:
        for name in policy:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without --fault, --faults, --chaos or --drain-limit-s")
        return None
    if "drain_limit_s" in policy and autoscale is None:
        raise ConfigError("--drain-limit-s has no effect without --autoscale; name a scaler")
    if args.online or args.engine == "qwen3":
        raise ConfigError(
            f"--fault does not work with {'--online' if args.online else '--engine qwen3'}; leave one out"
        )
    return FaultPlan(faults=faults, seed=args.chaos or 0, **policy)


def _draw(args: argparse.Namespace, settings: ReplaySettings, workload: Workload) -> tuple[Fault, ...]:
    from understudy.errors import ConfigError
    from understudy.run.chaos import draw_faults
    from understudy.run.faults import KINDS

    if not workload.has_arrivals or not len(workload):
        raise ConfigError("--chaos: the trace has no timestamps, so its end is not known; give --faults")
    workers = sum(pool.workers for pool in settings.pools) if settings.pools else settings.workers
    kinds: tuple[Kind, ...] = _list_kinds(settings)
    if args.chaos_kinds is not None:
        named = args.chaos_kinds.split(",")
        kinds = tuple(kind for kind in KINDS if kind in named)
        if unknown := [name for name in named if name not in KINDS]:
            raise ConfigError(f"--chaos-kinds: {unknown[0]} is not a fault; choose {', '.join(KINDS)}")
    last_ns = int(workload.arrival_ns.max()) - int(workload.arrival_ns.min())
    scale = getattr(settings.load, "arrival_rate_scale", 1.0)
    per_hour = 60.0 if args.chaos_rate is None else args.chaos_rate
    return draw_faults(
        args.chaos, per_hour=per_hour, end_s=last_ns / 1e9 / scale, workers=workers, kinds=kinds
    )


def _list_kinds(settings: ReplaySettings) -> tuple[Kind, ...]:
    """List the faults that this fleet can have."""
    import math

    from understudy.run.chaos import list_kinds
    from understudy.run.pools import make_pools
    from understudy.tiers.plan import TierPlan

    pools = settings.pools or make_pools((), settings.engine, settings.workers, settings.tiers)
    plans = [TierPlan.of(pool.resolve_tiers(), pool.engine.block_size) for pool in pools]
    hosts = [None if plan is None else plan.tiers[0] for plan in plans]
    routing = settings.policy
    return list_kinds(
        reads_events=not isinstance(routing, str) or routing == "kv",
        has_host_tier=all(host is not None for host in hosts),
        has_limited_host_link=all(
            host is not None and any(math.isfinite(link.bandwidth_gbps) for link in (*host.down, *host.up))
            for host in hosts
        ),
        loses_requests=settings.disaggregation is None,
    )
