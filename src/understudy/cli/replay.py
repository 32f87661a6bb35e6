"""`understudy replay TRACE`: what would a fleet have done with this traffic?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli import engine_flags, gpu_flags, router_flags, tier_flags, trace_flags
from understudy.outputs import check_outputs, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli import Verbs
    from understudy.report import Report, Slo
    from understudy.run.settings import ReplaySettings
    from understudy.workload import Workload

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --online --speedup 10    live workers over HTTP, ten times as fast
  understudy replay trace.jsonl --workers 4 --html report.html
  understudy replay trace.jsonl --workers 8 --block-size 16 --num-gpu-blocks 65536 --json report.json
  understudy replay trace.jsonl --concurrency 64 --slo-ttft-ms 500 --slo-itl-ms 50
  understudy replay trace.jsonl --config fleet.yaml --set engine.max_num_seqs=128
  understudy replay trace.jsonl --engine qwen3 --step-times steps.jsonl    the twin of the real engine
  zcat trace.jsonl.gz | understudy replay - --json - | jq .ttft_ms.p99
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy replay`."""
    import argparse

    verb = verbs.add_parser(
        "replay",
        help="replay a trace through simulated workers",
        description="Replay a trace through simulated workers on a virtual clock and report what would have happened.",
        epilog=EXAMPLES + gpu_flags.EXAMPLES + router_flags.EXAMPLES + tier_flags.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument(
        "trace", type=Path, metavar="TRACE", help="trace file, plain or gzipped; -: standard input"
    )
    trace_flags.add_trace_flags(verb)

    verb.add_argument(
        "--max-tokens", type=int, metavar="N", help="limit of requests without one: longer outputs are cut"
    )

    fleet = verb.add_argument_group("fleet")
    fleet.add_argument("--workers", type=int, metavar="N", help="simulated workers (default: 1)")
    fleet.add_argument(
        "--routing",
        metavar="NAME",
        help="round_robin (default), random, least_loaded, power_of_two, session_affinity or kv",
    )
    fleet.add_argument("--seed", type=int, metavar="N", help="of random routing (default: 0)")
    fleet.add_argument(
        "--concurrency", type=int, metavar="N", help="closed loop: at most N sessions at a time"
    )
    fleet.add_argument(
        "--speed-up", type=float, metavar="X", help="open loop: play timestamps X times as fast"
    )

    verb.add_argument(
        "--engine",
        choices=("vllm", "qwen3"),
        default="vllm",
        help="vllm (default), or the twin of the real engine, one worker (extra [torch])",
    )
    verb.add_argument(
        "--step-times",
        type=Path,
        metavar="PATH",
        help="of --engine qwen3: recorded steps, from `understudy qwen3 bench --record`",
    )
    engine_flags.add_engine_flags(verb)
    router_flags.add_router_flags(verb)
    gpu_flags.add_gpu_flags(verb)
    tier_flags.add_tier_flags(verb)
    verb.add_argument("--config", type=Path, metavar="YAML", help="settings from a file; flags win over it")
    verb.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="one setting; wins over all"
    )

    goals = verb.add_argument_group("goals for goodput")
    goals.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="time to first token at most this")
    goals.add_argument("--slo-itl-ms", type=float, metavar="MS", help="mean gap between tokens at most this")
    goals.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="whole request at most this")

    out = verb.add_argument_group("output (PATH may be -, for standard output)")
    out.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    out.add_argument("--requests-jsonl", type=Path, metavar="PATH", help="write a line a request")
    out.add_argument("--html", type=Path, metavar="PATH", help="write one self-contained page with plots")
    out.add_argument(
        "--events",
        type=Path,
        metavar="PATH",
        help="write the KV events, consolidated: a line each, or columns (.npz: faster)",
    )
    out.add_argument(
        "--raw-events", type=Path, metavar="PATH", help="write the KV events that such engines send, likewise"
    )
    out.add_argument(
        "--synthesize-tokens",
        action="store_true",
        help="token ids in lines of events, made from the trace's ids, and local hashes of those",
    )
    out.add_argument(
        "--kv-trace", type=Path, metavar="PATH", help="write a line an allocation or eviction of blocks"
    )
    out.add_argument(
        "--record-steps",
        type=Path,
        metavar="PATH",
        help="write every step as `conformance` reads it (.gz: zipped)",
    )
    out.add_argument(
        "--decisions", type=Path, metavar="PATH", help="write a line a choice of the KV-aware router, and why"
    )
    out.add_argument("--digest", action="store_true", help="print only the digest of the run")
    out.add_argument("--quiet", action="store_true", help="no table, no progress bar")
    out.add_argument(
        "--allow-empty",
        action="store_true",
        help="succeed though the trace holds no request, or all are rejected",
    )

    how = verb.add_argument_group("how to run")
    how.add_argument(
        "--threads", type=int, default=1, metavar="N", help="for independent workers (default: 1)"
    )
    how.add_argument(
        "--check", action="store_true", help="verify conservation and events after every step (slow)"
    )
    how.add_argument(
        "--online",
        action="store_true",
        help="against live workers over HTTP, in real time; tells how late it was",
    )
    how.add_argument(
        "--speedup",
        type=float,
        metavar="X",
        help="--online: simulated time passes X times as fast (default: 1)",
    )
    how.add_argument(
        "--no-leaping", action="store_true", help="play every decode step by itself; same result"
    )


def run(args: argparse.Namespace) -> int:
    """Replay, then print and write what was asked for."""
    import time
    from dataclasses import replace

    from understudy.api import replay
    from understudy.errors import InvalidArgument
    from understudy.run.settings import ReplaySettings
    from understudy.workload import read_trace

    if args.step_times is not None and args.engine != "qwen3":
        raise InvalidArgument("--step-times are those of --engine qwen3")
    flags = {**_flags(args), **router_flags.router_settings(args), **tier_flags.tier_settings(args)}
    settings = ReplaySettings.read(args.config, flags, args.set, base=_scenario_settings(args))
    if not settings.tiers.tiers:
        tier_flags.refuse_idle_flags(args)
    outputs = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OUTPUTS}
    outputs = {flag: path for flag, path in outputs.items() if path is not None}
    check_outputs(outputs, _inputs(args, settings))  # known before the run, not after it
    started = time.perf_counter()
    workload = read_trace(args.trace, format=args.format, **trace_flags.reader_options(args))
    if not len(workload) and not args.allow_empty:
        raise InvalidArgument(f"{args.trace} holds no request; --allow-empty reports on nothing all the same")
    with _progress(args, len(workload)) as progress:
        report: Report = (
            _twin(args, settings, workload, progress)
            if args.engine == "qwen3"
            else _online(args, settings, workload, progress)
            if args.online
            else replay(
                workload,
                None if settings.pools else settings.engine,
                workers=settings.workers,
                pools=settings.pools,
                routing=settings.policy,
                route_rejected=settings.route_rejected,
                seed=settings.seed,
                load=settings.load,
                max_tokens=args.max_tokens,
                tiers=None if settings.pools else settings.tiers,
                compare_without_tiers=args.compare_without_tiers,
                slo=_slo(args),
                threads=args.threads,
                leaping=not args.no_leaping,
                check=args.check,
                ranks=settings.ranks,
                timing=gpu_flags.op_tables(args, settings),
                events=args.events,
                raw_events=args.raw_events,
                synthesize_tokens=args.synthesize_tokens,
                kv_trace=args.kv_trace,
                progress=progress,
                record_steps=args.record_steps,
                decisions=args.decisions,
            )
        )
    report = report.with_run(workload=args.trace.name, wall_time_s=time.perf_counter() - started)
    if settings.notes:
        report = report.with_run(notes=[*report.run.get("notes", ()), *settings.notes])
    if (without := report.without_tiers) is not None:
        report = replace(report, without_tiers=without.with_run(workload=f"{args.trace.name} without tiers"))
    if args.json:
        report.to_json(args.json)
    if args.requests_jsonl:
        report.requests_jsonl(args.requests_jsonl)
    if args.html:
        report.to_html(args.html)
    _print(report, args, outputs)
    requests = report.requests
    if requests.rejected == requests.total and not args.allow_empty:
        row, reason = next(iter(report.columns.reject_reasons.items()))
        raise InvalidArgument(
            f"every request was rejected (request {row}: {reason}), so there is nothing to report; "
            "--allow-empty takes that for a success"
        )
    return 0


_OUTPUTS = ("json", "requests_jsonl", "html", "events", "raw_events", "kv_trace", "record_steps", "decisions")


_TWIN_FLAGS = (
    *("block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_prefix_caching", "num_g2_blocks"),
)


def _twin(args: argparse.Namespace, settings: ReplaySettings, workload: Workload, progress: Any) -> Report:
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
    from understudy.qwen3.record import Record
    from understudy.qwen3.replay import TwinOptions, replay_twin

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
    return replay_twin(limited, args.trace.name, record, options, slo=_slo(args), progress=progress)


def _online(args: argparse.Namespace, settings: ReplaySettings, workload: Workload, progress: Any) -> Report:
    import sys

    from understudy.errors import ConfigError
    from understudy.server.online import replay_online
    from understudy.workload import OpenLoop

    if not isinstance(settings.load, OpenLoop):
        raise ConfigError("--online plays timestamps; it has no closed loop")
    for name in ("events", "raw_events", "kv_trace", "record_steps", "decisions"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is written offline only; leave out --online")
    if settings.route_rejected:
        raise ConfigError("--route-rejected is for offline runs; leave out --online")
    report = replay_online(
        workload if args.max_tokens is None else workload.limited(args.max_tokens),
        args.trace.name,
        settings.engine,
        slo=_slo(args),
        workers=settings.workers,
        routing=settings.policy,
        seed=settings.seed,
        speed_up=settings.load.speed_up,
        speedup=1.0 if args.speedup is None else args.speedup,
        tiers=settings.tiers,
        progress=progress,
    )
    if not (args.quiet or args.digest):
        late = report.run["lateness_ms"]
        print(
            f"the machine was late: tokens p50 {late['token_p50']:.1f} ms, p99 {late['token_p99']:.1f} ms; "
            f"first tokens at the client p99 {late['client_first_token_p99']:.1f} ms",
            file=sys.stderr,
        )
    return report


def _inputs(args: argparse.Namespace, settings: ReplaySettings) -> dict[str, Path | str | None]:
    """The files that a run reads, by what the user calls them."""
    model = settings.tiers.model
    return {
        "TRACE": trace_flags.path_read(args),
        "--config": args.config,
        "model": model if model is not None and Path(model).is_file() else None,
        "engine.timing": getattr(settings.engine.timing, "path", None),
        "--step-times": args.step_times,
    }


def _print(report: Report, args: argparse.Namespace, outputs: dict[str, Path]) -> None:
    """The table, and a line a file; beside standard output where a file goes there."""
    import sys

    from rich.console import Console

    if args.digest:
        print(report.run["digest"])
    elif not args.quiet:
        report.print(Console(highlight=False, stderr=any(map(is_stdout, outputs.values()))))
        for path in outputs.values():
            if not is_stdout(path):
                print(f"written: {path}", file=sys.stderr)


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, nested as in a configuration file."""
    from understudy.errors import ConfigError

    fleet = {name: getattr(args, name) for name in ("workers", "routing", "seed")}
    flags: dict[str, Any] = {name: value for name, value in fleet.items() if value is not None}
    flags |= gpu_flags.gpu_settings(args)
    if engine := engine_flags.engine_settings(args):
        flags["engine"] = {**flags.get("engine", {}), **engine}
    if args.concurrency is not None and args.speed_up is not None:
        raise ConfigError("speed_up contradicts concurrency: a closed loop has no timestamps to play faster")
    if args.concurrency is not None:
        flags["load"] = {"kind": "closed_loop", "concurrency": args.concurrency}
    if args.speed_up is not None:
        flags.setdefault("load", {"kind": "open_loop"})["speed_up"] = args.speed_up
    return flags


def _scenario_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a scenario says of the run itself."""
    if args.format != "vllm-scenario":
        return {}
    from understudy.engines.scenario import read_scenario

    settings = read_scenario(args.trace).config.settings()
    return {"engine": settings, "load": {"kind": "lockstep"}}


def _slo(args: argparse.Namespace) -> Slo | None:
    from understudy.report import Slo

    goals = {"ttft_ms": args.slo_ttft_ms, "itl_ms": args.slo_itl_ms, "e2e_ms": args.slo_e2e_ms}
    return Slo(**goals) if any(value is not None for value in goals.values()) else None


class _progress:
    """A progress bar on a terminal, nothing elsewhere; counts requests that have ended."""

    def __init__(self, args: argparse.Namespace, requests: int) -> None:
        import sys

        self._requests = requests
        self._show = sys.stderr.isatty() and not (args.quiet or args.digest)

    def __enter__(self) -> Any:
        if not self._show:
            return None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("replaying"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests, left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        task = self._bar.add_task("replay", total=self._requests)
        return lambda ended: self._bar.update(task, completed=ended)

    def __exit__(self, *_: object) -> None:
        if self._show:
            self._bar.stop()
