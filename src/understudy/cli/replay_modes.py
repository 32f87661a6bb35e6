"""Replays that do not use the offline core: on live workers, and by the scheduler of the real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.cli import engine_flags, gpu_flags, tier_flags
from understudy.cli.slo import read_slo

if TYPE_CHECKING:
    import argparse

    from understudy.report import Report
    from understudy.run.session_kv import SessionKv
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload


_REAL_ENGINE_FLAGS = (
    *("block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_prefix_caching", "num_g2_blocks"),
)

_OFFLINE_OUTPUTS = ("events", "raw_events", "kv_trace", "record_steps", "decisions", "save_run", "perfetto")

_UNUSED_BY_REAL_ENGINE = {
    "no_fast_forward": False,
    "synthesize_tokens": False,
    "route_rejected": None,
    "threads": 1,
    "seed": None,
}
"""Flags without effect on --engine qwen3, with their defaults."""


def replay_real_engine(
    args: argparse.Namespace, settings: ReplaySettings, workload: Workload, progress: Any
) -> Report:
    """Replay with the real engine's scheduler and recorded step times. ConfigError names an unsupported flag."""
    from understudy.cli.needs_torch import check_torch_is_installed
    from understudy.errors import ConfigError
    from understudy.workload import OpenLoop

    if args.step_times is None:
        raise ConfigError(
            "--engine qwen3 needs --step-times; record them with `understudy qwen3 bench --record`"
        )
    for name in _OFFLINE_OUTPUTS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is not supported by --engine qwen3; leave it out")
    if args.online or args.check or args.compare_without_tiers or args.config is not None or args.set:
        raise ConfigError(
            "--engine qwen3 does not support --online, --check, --compare-without-tiers, --config or --set"
        )
    for name, default in _UNUSED_BY_REAL_ENGINE.items():
        if getattr(args, name) != default and not (name == "seed" and args.users is not None):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on --engine qwen3; leave it out")
    if not isinstance(settings.load, OpenLoop) or settings.workers != 1 or settings.routing != "round_robin":
        raise ConfigError(
            "--engine qwen3 supports one worker and open-loop arrivals; leave out --workers, --routing, --concurrency"
        )
    unsupported = {
        "GPU and timing flags": gpu_flags.gpu_settings(args),
        "tier flags other than --num-g2-blocks": tier_flags.tier_settings(args),
    }
    for flags, given_settings in unsupported.items():
        if given_settings:
            raise ConfigError(
                f"--engine qwen3 reads its times and KV sizes from --step-times; leave out {flags}"
            )
    given = engine_flags.engine_settings(args)
    if other := sorted(set(given) - set(_REAL_ENGINE_FLAGS)):
        raise ConfigError(f"--{other[0].replace('_', '-')} is not supported by --engine qwen3; leave it out")
    _refuse_aborts(workload, "--engine qwen3")
    if workload.graph is not None:
        raise ConfigError("--engine qwen3 does not replay requests that wait for one another; leave it out")
    check_torch_is_installed()
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
        arrival_rate_scale=settings.load.arrival_rate_scale,
    )
    limited = workload if args.max_tokens is None else workload.limited(args.max_tokens)
    record = Record.read(args.step_times)
    return replay_twin(limited, args.trace.name, record, options, slo=read_slo(args), progress=progress)


def _refuse_aborts(workload: Workload, flag: str) -> None:
    from understudy.errors import ConfigError

    if workload.has_aborts:
        raise ConfigError(f"abort_after_ms: {flag} does not abort requests; leave the key out of the trace")


def replay_on_live_workers(
    args: argparse.Namespace,
    settings: ReplaySettings,
    workload: Workload,
    progress: Any,
    session_kv: SessionKv | None = None,
) -> Report:
    """Replay against live workers over HTTP; the report includes the machine's lateness."""
    from understudy.checks import positive_number
    from understudy.errors import ConfigError
    from understudy.online import replay_online
    from understudy.router.delayed import DelayedEvents
    from understudy.workload import OpenLoop, Plays

    _refuse_aborts(workload, "--online")
    if not isinstance(settings.load, OpenLoop | Plays):
        raise ConfigError("--online supports open-loop arrivals and plays only; leave out --concurrency")
    if settings.disaggregation is not None:
        raise ConfigError(
            "--online does not work with prefill and decode workers; use `understudy fleet --disaggregate`"
        )
    for name in _OFFLINE_OUTPUTS:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is written offline only; leave out --online")
    for name in ("compare_without_tiers", "check", "no_fast_forward", "synthesize_tokens"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for offline runs; leave out --online")
    if args.threads != 1:
        raise ConfigError("--threads is for offline runs; leave out --online")
    if settings.pools:
        raise ConfigError(
            "pools are for offline runs; leave out --online, or use `understudy fleet` for live pools"
        )
    if settings.ranks:
        raise ConfigError(
            "data_parallel_size makes ranks that step together, which only offline runs support; leave out --online"
        )
    clock_speed = 1.0 if args.clock_speed is None else args.clock_speed
    positive_number("--clock-speed", clock_speed, remedy="2 runs the clock twice as fast")
    if settings.engine.mocker.route_rejected:
        raise ConfigError("--route-rejected is for offline runs; leave out --online")
    policy = settings.policy
    if isinstance(policy, DelayedEvents):
        named = ", ".join(policy.settings)
        raise ConfigError(f"{named}: live events have their real delays; leave it out, or leave out --online")
    return replay_online(
        workload if args.max_tokens is None else workload.limited(args.max_tokens),
        args.trace.name,
        settings.engine,
        slo=read_slo(args),
        workers=settings.workers,
        routing=policy,
        seed=settings.seed,
        arrival_rate_scale=settings.load.arrival_rate_scale,
        plays=settings.load if isinstance(settings.load, Plays) else None,
        clock_speed=clock_speed,
        tiers=settings.tiers,
        session_kv=session_kv,
        progress=progress,
    )
