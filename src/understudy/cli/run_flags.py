"""Flags that describe a run: its trace, its fleet and its objectives; and the settings that they give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli import (
    disaggregation_flags,
    engine_flags,
    gpu_flags,
    router_flags,
    sglang_flags,
    tier_flags,
    trace_flags,
    trtllm_flags,
)
from understudy.cli.flag_names import add_renamed_flag
from understudy.kind_names import KIND_MODULES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from understudy.run.settings import ReplaySettings


def add_run_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that describe a run: its trace, its fleet and its objectives."""
    add_trace(verb)

    verb.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="cut outputs to N tokens, for requests without a limit of their own",
    )

    fleet = verb.add_argument_group("fleet")
    add_fleet_flags(fleet.add_argument)
    fleet.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of routing random, power_of_two or kv, of --users, and of random tier load failures (default: 0)",
    )
    fleet.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: at most N sessions at a time"
    )
    fleet.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="agents: at most N plays at a time (default: all, each at its time)",
    )
    fleet.add_argument(
        "--clock",
        choices=("client", "recorded"),
        help="agents: a request follows the answers it waits for after the recorded gap (client, the default), and "
        "also comes no earlier than recorded",
    )
    fleet.add_argument(
        "--warm-up",
        action="store_true",
        default=None,
        help="agents: begin with plays cut in their middle, after requests that fill the caches",
    )
    fleet.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="agents: start plays, again and again, and send requests for S seconds",
    )
    fleet.add_argument(
        "--grace", type=float, metavar="S", help="cancel what runs S seconds after the duration (default: 30)"
    )
    fleet.add_argument(
        "--play-idle-cap",
        type=float,
        metavar="S",
        help="longest time in which no request of a play runs; 0: no limit (default with --duration: 300)",
    )
    fleet.add_argument(
        "--fleet-idle-cap",
        type=float,
        metavar="S",
        help="the same of all plays together (default with --duration: 10)",
    )
    add_users(fleet.add_argument)
    fleet.add_argument(
        "--arrival-rate-scale",
        type=float,
        metavar="X",
        help="open loop: the same users, X times as fast: delays between turns shrink too (default: 1); growth is "
        "--users",
    )
    add_renamed_flag(verb, "--speed-up", "--arrival-rate-scale")

    default, *others = KIND_MODULES
    verb.add_argument(
        "--engine",
        choices=(*KIND_MODULES, "qwen3"),
        default=default,
        help=", ".join((f"{default} (default)", *others, ""))
        + "or qwen3: simulate the real engine, one worker (extra [torch])",
    )
    verb.add_argument(
        "--step-times",
        type=Path,
        metavar="PATH",
        help="with --engine qwen3: step times recorded by `understudy qwen3 bench --record`",
    )
    engine_flags.add_engine_flags(verb)
    sglang_flags.SGLANG_FLAGS.add_to(verb)
    trtllm_flags.TRTLLM_FLAGS.add_to(verb)
    router_flags.add_router_flags(verb)
    gpu_flags.add_gpu_flags(verb)
    tier_flags.add_tier_flags(verb)
    disaggregation_flags.add_disaggregation_flags(verb)
    add_settings_flags(verb.add_argument)

    goals = verb.add_argument_group("service-level objectives, for goodput")
    goals.add_argument(
        "--slo-ttft-ms",
        type=float,
        metavar="MS",
        help="longest time to the first token, such as 2000 for two seconds",
    )
    goals.add_argument(
        "--slo-itl-ms", type=float, metavar="MS", help="longest mean time between the tokens of a request"
    )
    goals.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="longest time of a whole request")


def add_trace(verb: argparse.ArgumentParser) -> None:
    """Add the trace of a verb, and the flags of its reader."""
    verb.add_argument(
        "trace", type=Path, metavar="TRACE", help="trace file, plain or gzipped; -: standard input"
    )
    trace_flags.add_trace_flags(verb)


def add_fleet_flags(add: Callable[..., object]) -> None:
    """Add the number of workers and their routing; `add` is the parser's or group's add_argument."""
    add(
        "--workers",
        type=int,
        metavar="N",
        help="simulated engines, each of --data-parallel-size ranks (default: 1)",
    )
    add(
        "--routing",
        metavar="NAME",
        help="round_robin (default), random, least_loaded, power_of_two, session_affinity, session_tree, kv, or "
        "FILE.py:CLASS",
    )


def add_users(add: Callable[..., object]) -> None:
    """Add the number of users; `add` is the parser's or group's add_argument."""
    add(
        "--users",
        type=float,
        metavar="X",
        help="X times the users of the trace, each as fast as there: sessions are copied with content of their own, or "
        "sampled if X is below 1; prefixes that all users share stay shared (default: 1)",
    )


def add_settings_flags(add: Callable[..., object]) -> None:
    """Add the settings file, and single settings; `add` is the parser's or group's add_argument."""
    add("--config", type=Path, metavar="YAML", help="settings file; flags override it")
    add(
        "--set",
        action="append",
        default=[],
        metavar="A.B=V",
        help="one setting; overrides --config and flags",
    )


def read_settings(args: argparse.Namespace) -> ReplaySettings:
    """Return the settings that the flags of a run give. ConfigError names a flag that is invalid or unused."""
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Plays

    flags = {**_read_flags(args), **router_flags.router_settings(args), **tier_flags.tier_settings(args)}
    flags |= disaggregation_flags.disaggregation_settings(args)
    settings = ReplaySettings.read(args.config, flags, args.set, base=trace_flags.scenario_settings(args))
    if not settings.tiers.tiers:
        tier_flags.reject_unused_flags(args)
    if args.engine != "qwen3":
        all_tiers = [pool.tiers for pool in settings.pools] if settings.pools else [settings.tiers]
        loads_fail = any(tiers is not None and tiers.offload.onboard_failure_rate for tiers in all_tiers)
        split = settings.disaggregation
        reads_fail = split is not None and split.transfer_failure_rate > 0
        router_flags.read_seed(
            args.seed,
            settings.router or settings.routing,
            is_used=loads_fail
            or reads_fail
            or bool((settings.event_delivery or {}).get("event_loss"))
            or args.users is not None
            or settings.users != 1
            or (isinstance(settings.load, Plays) and settings.load.warm_up),
        )
    return settings


_PLAYS = {
    "lanes": "lanes",
    "clock": "clock",
    "warm_up": "warm_up",
    "duration": "duration_s",
    "grace": "grace_s",
    "play_idle_cap": "play_idle_s",
    "fleet_idle_cap": "fleet_idle_s",
}
"""Settings of `Plays` by flag."""


def _read_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given as flags, nested as in a configuration file."""
    from understudy.errors import ConfigError

    fleet = {name: getattr(args, name) for name in ("workers", "routing", "seed", "users")}
    flags: dict[str, Any] = {name: value for name, value in fleet.items() if value is not None}
    flags |= gpu_flags.gpu_settings(args)
    _, *others = KIND_MODULES
    if args.engine in others:
        flags["engine"] = {**flags.get("engine", {}), "engine_type": args.engine}
    for own in (sglang_flags.read_sglang_flags(args), trtllm_flags.read_trtllm_flags(args)):
        for name, given in own.items():
            flags[name] = {**flags.get(name, {}), **given} if isinstance(given, dict) else given
    if engine := engine_flags.engine_settings(args):
        flags["engine"] = {**flags.get("engine", {}), **engine}
    if args.concurrency is not None and args.arrival_rate_scale is not None:
        raise ConfigError(
            "arrival_rate_scale contradicts concurrency: a closed loop uses no timestamps; give one"
        )
    if args.concurrency is not None and args.users is not None:
        raise ConfigError(
            "users contradicts concurrency: the load of a closed loop is its number of sessions at a time; give a "
            "larger concurrency, or leave it out"
        )
    plays = {name: value for flag, name in _PLAYS.items() if (value := getattr(args, flag)) is not None}
    if plays and args.concurrency is not None:
        raise ConfigError(f"concurrency contradicts {next(iter(plays))}; give --lanes for plays")
    if plays:
        flags["load"] = {"kind": "plays", **plays}
    if args.concurrency is not None:
        flags["load"] = {"kind": "closed_loop", "concurrency": args.concurrency}
    if args.arrival_rate_scale is not None:
        flags.setdefault("load", {"kind": "open_loop"})["arrival_rate_scale"] = args.arrival_rate_scale
    return flags
