"""`understudy replay TRACE`: what would a fleet have done with this traffic?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli import engine_flags, gpu_flags, router_flags, tier_flags, trace_flags
from understudy.outputs import check_outputs, files_named, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli import Verbs
    from understudy.report import Report

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
    verb = verbs.add_parser(
        "replay",
        help="replay a trace through simulated workers",
        description="Replay a trace through simulated workers on a virtual clock and report what would have happened.",
        epilog=EXAMPLES + gpu_flags.EXAMPLES + router_flags.EXAMPLES + tier_flags.EXAMPLES,
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
        help="round_robin (default), random, least_loaded, power_of_two, session_affinity, kv, or FILE.py:CLASS",
    )
    fleet.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of routing random, power_of_two or kv, and of loads that fail by chance (default: 0)",
    )
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
    from contextlib import nullcontext
    from dataclasses import replace

    from understudy.api import replay
    from understudy.cli.progress import progress_bar, progress_bars
    from understudy.cli.replay_others import replay_online_with, replay_twin_of, slo_of
    from understudy.errors import InvalidArgument
    from understudy.run.settings import ReplaySettings, files_given
    from understudy.workload import read_trace
    from understudy.workload.telling import telling

    if args.step_times is not None and args.engine != "qwen3":
        raise InvalidArgument("--step-times are those of --engine qwen3")
    if args.speedup is not None and not args.online:
        raise InvalidArgument("--speedup is of --online; offline, --speed-up plays timestamps faster")
    outputs = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OUTPUTS}
    outputs = {flag: path for flag, path in outputs.items() if path is not None}
    check_outputs(outputs, _inputs(args))  # known before the run, not after it
    if args.digest and (printed := next((flag for flag in outputs if is_stdout(outputs[flag])), None)):
        raise InvalidArgument(
            f"--digest is printed to standard output, where {printed} goes: name a file for it"
        )
    flags = {**_flags(args), **router_flags.router_settings(args), **tier_flags.tier_settings(args)}
    settings = ReplaySettings.read(args.config, flags, args.set, base=trace_flags.scenario_settings(args))
    if not settings.tiers.tiers:
        tier_flags.refuse_idle_flags(args)
    if args.engine != "qwen3":
        below = [pool.tiers for pool in settings.pools] if settings.pools else [settings.tiers]
        fails = any(tiers is not None and tiers.offload.onboard_failure_rate for tiers in below)
        router_flags.seed_of(args.seed, settings.router or settings.routing, fails=fails)
    check_outputs(outputs, {**files_given(args.config, args.set), **files_named(settings)})
    started = time.perf_counter()
    hidden = args.quiet or args.digest
    with nullcontext() if hidden else progress_bars() as told, telling(told):
        workload = read_trace(args.trace, format=args.format, **trace_flags.reader_options(args))
    if not len(workload) and not args.allow_empty:
        raise InvalidArgument(f"{args.trace} holds no request; --allow-empty reports on nothing all the same")
    with nullcontext() if hidden else progress_bar("replaying", len(workload), "requests") as progress:
        report: Report = (
            replay_twin_of(args, settings, workload, progress)
            if args.engine == "qwen3"
            else replay_online_with(args, settings, workload, progress)
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
                slo=slo_of(args),
                threads=args.threads,
                leaping=not args.no_leaping,
                check=args.check,
                ranks=settings.ranks,
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


def _inputs(args: argparse.Namespace) -> dict[str, Path | None]:
    """The files that flags name; settings may name more."""
    flags = {
        f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in _OUTPUTS
    }
    del flags["--trace"]
    return {"TRACE": trace_flags.path_read(args), **files_named(flags)}


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
