"""Replays that the core does not play offline: against live workers, and by the twin of the real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.cli import engine_flags, gpu_flags, tier_flags

if TYPE_CHECKING:
    import argparse

    from understudy.report import Report, Slo
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload


def slo_of(args: argparse.Namespace) -> Slo | None:
    """The goals that were given."""
    from understudy.report import Slo

    goals = {"ttft_ms": args.slo_ttft_ms, "itl_ms": args.slo_itl_ms, "e2e_ms": args.slo_e2e_ms}
    return Slo(**goals) if any(value is not None for value in goals.values()) else None


_TWIN_FLAGS = (
    *("block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_prefix_caching", "num_g2_blocks"),
)

_NOTHING_TO_THE_TWIN = {
    "no_leaping": False,
    "synthesize_tokens": False,
    "route_rejected": None,
    "threads": 1,
    "seed": None,
}
"""Flags, with what they are unless given."""


def replay_twin_of(
    args: argparse.Namespace, settings: ReplaySettings, workload: Workload, progress: Any
) -> Report:
    """Replay by the twin of the real engine. ConfigError names what it does not do."""
    from understudy.cli.qwen3 import needs_torch
    from understudy.errors import ConfigError
    from understudy.workload import OpenLoop

    if args.step_times is None:
        raise ConfigError(
            "--engine qwen3 needs --step-times: record them with `understudy qwen3 bench --record`"
        )
    for name in ("events", "raw_events", "kv_trace", "record_steps", "decisions"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is not written by --engine qwen3")
    if args.online or args.check or args.compare_without_tiers or args.config is not None or args.set:
        raise ConfigError(
            "--engine qwen3 has no --online, --check, --compare-without-tiers, --config or --set"
        )
    for name, unsaid in _NOTHING_TO_THE_TWIN.items():
        if getattr(args, name) != unsaid:
            raise ConfigError(f"--{name.replace('_', '-')} is nothing to --engine qwen3; leave it out")
    if not isinstance(settings.load, OpenLoop) or settings.workers != 1 or settings.routing != "round_robin":
        raise ConfigError("--engine qwen3 is one worker that plays timestamps")
    other_rooms = {
        "--gpu and its like": gpu_flags.gpu_settings(args),
        "tiers other than --num-g2-blocks": tier_flags.tier_settings(args),
    }
    for what, asked in other_rooms.items():
        if asked:
            raise ConfigError(
                f"--engine qwen3 takes its times and weights from --step-times: leave out {what}"
            )
    given = engine_flags.engine_settings(args)
    if other := sorted(set(given) - set(_TWIN_FLAGS)):
        raise ConfigError(f"--{other[0].replace('_', '-')} is no setting of --engine qwen3")
    needs_torch()
    from understudy.qwen3.replay import TwinOptions, replay_twin
    from understudy.timing.recorded.record import Record

    options = TwinOptions(
        num_blocks=given.get("num_gpu_blocks"),
        block_size=given.get("block_size"),
        max_num_seqs=given.get("max_num_seqs"),
        max_num_batched_tokens=given.get("max_num_batched_tokens"),
        max_model_len=given.get("max_model_len") or 40960,
        prefix_caching=given.get("enable_prefix_caching", True),
        host_blocks=given.get("num_g2_blocks"),
        speed_up=settings.load.speed_up,
    )
    limited = workload if args.max_tokens is None else workload.limited(args.max_tokens)
    record = Record.read(args.step_times)
    return replay_twin(limited, args.trace.name, record, options, slo=slo_of(args), progress=progress)


def replay_online_with(
    args: argparse.Namespace, settings: ReplaySettings, workload: Workload, progress: Any
) -> Report:
    """Replay against live workers over HTTP, and say how late the machine was."""
    import math

    from understudy.errors import ConfigError
    from understudy.server.online import replay_online
    from understudy.workload import OpenLoop

    if not isinstance(settings.load, OpenLoop):
        raise ConfigError("--online plays timestamps; it has no closed loop")
    for name in ("events", "raw_events", "kv_trace", "record_steps", "decisions"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is written offline only; leave out --online")
    for name in ("compare_without_tiers", "check", "no_leaping", "synthesize_tokens"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for offline runs; leave out --online")
    if args.threads != 1:
        raise ConfigError("--threads is for offline runs; leave out --online")
    if settings.pools:
        raise ConfigError(
            "pools are for offline runs (live, `understudy fleet` has them); leave out --online"
        )
    if settings.ranks:
        raise ConfigError(
            "data_parallel_size makes ranks that share experts and step together, offline only; leave out --online"
        )
    speedup = 1.0 if args.speedup is None else args.speedup
    if not (math.isfinite(speedup) and speedup > 0):
        raise ConfigError(f"--speedup must be positive, got {speedup:g}")
    if settings.route_rejected:
        raise ConfigError("--route-rejected is for offline runs; leave out --online")
    return replay_online(
        workload if args.max_tokens is None else workload.limited(args.max_tokens),
        args.trace.name,
        settings.engine,
        slo=slo_of(args),
        workers=settings.workers,
        routing=settings.policy,
        seed=settings.seed,
        speed_up=settings.load.speed_up,
        speedup=speedup,
        tiers=settings.tiers,
        progress=progress,
    )
