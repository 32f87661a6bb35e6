"""`understudy replay TRACE`: simulate a fleet that serves recorded traffic and report its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import (
    autoscale_flags,
    disaggregation_flags,
    fault_flags,
    gpu_flags,
    play_flags,
    router_flags,
    run_flags,
    session_flags,
    tier_flags,
    trace_flags,
)
from understudy.cli.flag_names import add_renamed_flag
from understudy.cli.parser import Parser
from understudy.cli.written import print_written
from understudy.outputs import check_outputs, files_named, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs
    from understudy.report import Report

SHORT_EXAMPLES = """\
examples:
  understudy replay trace.jsonl --workers 4 --html report.html
  understudy replay trace.jsonl --model Llama-3.1-8B --gpu H100 --slo-ttft-ms 500 --slo-itl-ms 50
  understudy replay trace.jsonl --workers 16 --routing kv --json report.json
  understudy replay trace.jsonl --model Llama-3.1-8B --g2-bytes 512GiB --compare-without-tiers
  understudy replay trace.jsonl --concurrency 64 --config fleet.yaml --set engine.max_num_seqs=128
  zcat trace.jsonl.gz | understudy replay - --json - | jq .ttft_ms.p99
"""
TASKS = {
    "read a trace and set the load": ("--format", "--users", "--concurrency"),
    "describe the fleet": ("--workers", "--routing"),
    "name the model and its GPU": ("--model", "--gpu", "--tensor-parallel-size", "--timing"),
    "configure the engine": (
        "--engine",
        "--block-size",
        "--num-gpu-blocks",
        "--max-num-seqs",
    ),
    "add KV tiers below the GPU": ("--g2-bytes", "--g3-bytes", "--compare-without-tiers"),
    "set service-level objectives": ("--slo-ttft-ms", "--slo-itl-ms"),
    "write outputs (PATH may be -, for standard output)": (
        "--json",
        "--html",
        "--requests-jsonl",
        "--events",
    ),
    "give any setting, and run": ("--config", "--set", "--threads"),
}
"""Flags that --help shows, by task."""

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --online --clock-speed 10    live workers over HTTP, on a clock ten times as fast
  understudy replay trace.jsonl --workers 4 --html report.html
  understudy replay trace.jsonl --workers 8 --block-size 16 --num-gpu-blocks 65536 --json report.json
  understudy replay trace.jsonl --concurrency 64 --slo-ttft-ms 500 --slo-itl-ms 50
  understudy replay trace.jsonl --config fleet.yaml --set engine.max_num_seqs=128
  understudy replay trace.jsonl --workers 4 --save-run run.npz && understudy explain run.npz --slowest 20
  understudy replay trace.jsonl --workers 4 --perfetto trace.pftrace    open it in ui.perfetto.dev
  understudy replay trace.jsonl --engine sglang --page-size 64 --schedule-policy lpm
  understudy replay trace.jsonl --engine qwen3 --step-times steps.jsonl    simulate the real engine
  zcat trace.jsonl.gz | understudy replay - --json - | jq .ttft_ms.p99
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy replay`."""
    verb = verbs.add_parser(
        "replay",
        help="replay a trace through simulated workers",
        description="Replay a trace through simulated workers on a virtual clock and report latencies and cache use.",
        epilog=EXAMPLES
        + gpu_flags.EXAMPLES
        + router_flags.EXAMPLES
        + tier_flags.EXAMPLES
        + disaggregation_flags.EXAMPLES
        + autoscale_flags.EXAMPLES
        + session_flags.EXAMPLES
        + fault_flags.EXAMPLES,
    )
    run_flags.add_run_flags(verb)
    autoscale_flags.add_autoscale_flags(verb)
    session_flags.add_session_flags(verb)
    fault_flags.add_fault_flags(verb)
    _add_output_flags(verb)
    assert isinstance(verb, Parser)
    verb.add_short_help("understudy replay TRACE [flags]", SHORT_EXAMPLES, TASKS)


def _add_output_flags(verb: argparse.ArgumentParser) -> None:
    out = verb.add_argument_group("output (PATH may be -, for standard output)")
    out.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    out.add_argument("--requests-jsonl", type=Path, metavar="PATH", help="write one JSON line per request")
    out.add_argument("--html", type=Path, metavar="PATH", help="write one self-contained page with plots")
    out.add_argument(
        "--events",
        type=Path,
        metavar="PATH",
        help="write the consolidated KV events: one JSON line each, or columns (.npz: faster)",
    )
    out.add_argument(
        "--raw-events",
        type=Path,
        metavar="PATH",
        help="write the KV events as the engines send them: JSON lines or .npz",
    )
    out.add_argument(
        "--synthesize-tokens",
        action="store_true",
        help="add token ids, generated from the trace's hash ids, and their local hashes to event lines",
    )
    out.add_argument(
        "--kv-trace", type=Path, metavar="PATH", help="write one line per block allocation and eviction"
    )
    out.add_argument(
        "--record-steps",
        type=Path,
        metavar="PATH",
        help="write every step in the format of `conformance` (.gz: gzipped)",
    )
    out.add_argument(
        "--decisions",
        type=Path,
        metavar="PATH",
        help="write one line per choice of the router: worker, cached tokens, regret, candidates (kv: costs)",
    )
    out.add_argument(
        "--save-run",
        type=Path,
        metavar="PATH",
        help="write the run with every step, for `explain` and `diff` (.npz); no step is fast-forwarded",
    )
    out.add_argument(
        "--perfetto",
        type=Path,
        metavar="PATH",
        help="write a trace for ui.perfetto.dev: protobuf, or JSON if PATH ends in .json; no step is fast-forwarded",
    )
    play_flags.add_play_flags(out)
    out.add_argument(
        "--no-advice",
        action="store_true",
        help="do not replay the remedies of verdicts (about 10 s at most, by the size of the trace)",
    )
    out.add_argument("--digest", action="store_true", help="print only the digest of the run")
    out.add_argument("--quiet", action="store_true", help="print no table and no progress bar")
    out.add_argument(
        "--allow-empty",
        action="store_true",
        help="exit with 0 even if the trace contains no request or all are rejected",
    )

    execution = verb.add_argument_group("execution")
    execution.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads for independent workers (default: 1)"
    )
    execution.add_argument(
        "--check",
        nargs="?",
        const=True,
        default=False,
        type=_read_check,
        metavar="deep",
        help="verify the state after every step and fast-forward; deep: also replay the run step by step and compare",
    )
    execution.add_argument(
        "--online",
        action="store_true",
        help="send the requests to live workers over HTTP, in real time; report the lateness",
    )
    execution.add_argument(
        "--clock-speed",
        type=float,
        metavar="X",
        help="with --online: run the simulated clock X times as fast as real time (default: 1)",
    )
    add_renamed_flag(verb, "--speedup", "--clock-speed")
    execution.add_argument(
        "--no-fast-forward",
        action="store_true",
        help="simulate every decode step one by one instead of fast-forwarding; slower, same result",
    )
    add_renamed_flag(verb, "--no-leaping", "--no-fast-forward")


def _read_check(value: str) -> str:
    """Read the value of --check, which may be left out in front of another flag or at the end."""
    import argparse

    if value != "deep":
        raise argparse.ArgumentTypeError(f"{value!r} is not deep; write TRACE before --check")
    return value


def run(args: argparse.Namespace) -> int:
    """Replay the trace, then print and write the requested outputs."""
    import time
    from contextlib import nullcontext
    from dataclasses import replace

    from understudy.api import replay
    from understudy.cli.progress import progress_bar, progress_bars
    from understudy.cli.replay_modes import replay_on_live_workers, replay_real_engine
    from understudy.cli.slo import read_slo
    from understudy.errors import InvalidArgument
    from understudy.run.options import Execution, Outputs
    from understudy.run.settings import list_given_files
    from understudy.workload import scale_users
    from understudy.workload.progress import reporting_progress

    if args.step_times is not None and args.engine != "qwen3":
        raise InvalidArgument("--step-times needs --engine qwen3; leave it out")
    if args.clock_speed is not None and not args.online:
        raise InvalidArgument(
            "--clock-speed needs --online; offline, --users scales the users and --arrival-rate-scale their speed"
        )
    outputs = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _OUTPUTS}
    outputs = {flag: path for flag, path in outputs.items() if path is not None}
    check_outputs(outputs, _list_inputs(args))  # fail before the run, not after it
    if args.digest and (printed := next((flag for flag in outputs if is_stdout(outputs[flag])), None)):
        raise InvalidArgument(
            f"--digest: {printed} also writes to standard output; name a file for {printed}"
        )
    settings = run_flags.read_settings(args)
    autoscale = autoscale_flags.read_autoscale(args, settings)
    session_kv = session_flags.read_session_kv(args)
    play_flags.check_play_flags(args)
    check_outputs(outputs, {**list_given_files(args.config, args.set), **files_named(settings)})
    started = time.perf_counter()
    is_silent = args.quiet or args.digest
    with (
        nullcontext() if is_silent else progress_bars() as report_progress,
        reporting_progress(report_progress),
    ):
        workload = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    if not len(workload) and not args.allow_empty:
        raise InvalidArgument(f"{args.trace} contains no requests; --allow-empty accepts that")
    workload = scale_users(workload, settings.users, seed=settings.seed)
    faults = fault_flags.read_faults(args, settings, workload, autoscale)
    with nullcontext() if is_silent else progress_bar("replaying", len(workload), "requests") as progress:
        report: Report = (
            replay_real_engine(args, settings, workload, progress)
            if args.engine == "qwen3"
            else replay_on_live_workers(args, settings, workload, progress, session_kv)
            if args.online
            else replay(
                workload,
                None if settings.pools else settings.engine,
                workers=settings.workers,
                pools=settings.pools,
                routing=settings.policy,
                seed=settings.seed,
                load=settings.load,
                max_tokens=args.max_tokens,
                tiers=None if settings.pools else settings.tiers,
                compare_without_tiers=args.compare_without_tiers,
                slo=read_slo(args),
                ranks=settings.ranks,
                disaggregation=settings.disaggregation,
                autoscale=autoscale,
                session_kv=session_kv,
                faults=faults,
                outputs=Outputs(
                    events=args.events,
                    raw_events=args.raw_events,
                    kv_trace=args.kv_trace,
                    record_steps=args.record_steps,
                    decisions=args.decisions,
                    synthesize_tokens=args.synthesize_tokens,
                ),
                execution=Execution(
                    threads=args.threads,
                    fast_forward=not args.no_fast_forward,
                    check=args.check,
                    progress=progress,
                    keep_steps=args.save_run is not None or args.perfetto is not None,
                ),
            )
        )
    wall_time_s = time.perf_counter() - started
    splits = settings.disaggregation is not None and not settings.pools
    # Advice is about fleets of a fixed size, whose sessions have no policy and whose workers do not fail.
    is_changing = autoscale is not None or session_kv is not None or faults is not None
    is_simulated = not (args.online or args.engine == "qwen3" or is_changing)
    if is_simulated and not (splits or args.no_advice or args.digest):
        from understudy.cli.advice import try_remedies

        report = try_remedies(report, settings, workload, args)
    if is_simulated and splits and not (args.no_advice or args.digest):
        from understudy.cli.split_advice import try_splits

        report = try_splits(report, settings, workload, args)
    if (without := report.without_tiers) is not None:
        without = replace(without, run=replace(without.run, workload=f"{args.trace.name} without tiers"))
    facts = replace(
        report.run,
        workload=args.trace.name,
        notes=(*report.run.notes, *settings.notes),
        wall_time_s=wall_time_s,
    )
    report = replace(report, run=facts, without_tiers=without)
    if args.json:
        report.to_json(args.json)
    if args.requests_jsonl:
        report.requests_jsonl(args.requests_jsonl)
    if report.saved is not None:
        from understudy.explain.outputs import write_run

        saved = replace(report.saved, run=facts.to_dict())
        write_run(saved, save_run=args.save_run, perfetto=args.perfetto)
    if args.html:
        report.to_html(args.html)
    play_flags.write_plays(report, args)
    _print_report(report, args, outputs)
    requests = report.requests
    if requests.rejected == requests.total and not args.allow_empty:
        row, reason = next(iter(report.columns.reject_reasons.items()))
        raise InvalidArgument(
            f"every request was rejected (request {row}: {reason}); --allow-empty accepts that"
        )
    return 0


_OUTPUTS = (
    *("json", "requests_jsonl", "html", "events", "raw_events", "kv_trace", "record_steps", "decisions"),
    *("save_run", "perfetto"),
    *play_flags.OUTPUTS,
)


def _list_inputs(args: argparse.Namespace) -> dict[str, Path | None]:
    """List the input files that flags name; the settings may name more."""
    flags = {
        f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in _OUTPUTS
    }
    del flags["--trace"]
    return {"TRACE": trace_flags.path_read(args), **files_named(flags)}


def _print_report(report: Report, args: argparse.Namespace, outputs: dict[str, Path]) -> None:
    """Print the table and the written files; use standard error if an output goes to standard output."""

    from rich.console import Console

    if args.digest:
        print(report.run.digest)
    elif not args.quiet:
        console = Console(highlight=False, stderr=any(map(is_stdout, outputs.values())))
        report.print(console)
        for line in play_flags.describe_plays(report):
            console.print(line)
        print_written(outputs.values())
