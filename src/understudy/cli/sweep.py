"""`understudy sweep TRACE --vary FLAG=VALUES …`: replay many settings and find the cheapest fleet that meets a goal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import run_flags, trace_flags
from understudy.cli.flag_names import replace_settings_by_flags
from understudy.cli.parser import Parser
from understudy.cli.written import print_written
from understudy.defaults import GOAL
from understudy.errors import ConfigError
from understudy.outputs import check_outputs, create, files_named, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs
    from understudy.sweep.candidate import Candidate
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import Space
    from understudy.workload import Workload

EXAMPLES = """\
examples:
  understudy sweep trace.jsonl --model Qwen3-32B --gpu H200 --vary workers=1..8 tensor-parallel-size=1,2,4 \\
    routing=round_robin,kv --slo-ttft-ms 500 --slo-itl-ms 30 --gpu-hour H200=3.5 --store sweep.jsonl
  understudy sweep trace.jsonl --vary workers=1..64*2 max-num-seqs=64,128,256 --slo-ttft-ms 500 --json sweep.json
  understudy sweep trace.jsonl --engine sglang --vary workers=2..8+2 schedule-policy=fcfs,lpm --slo-e2e-ms 20000
  understudy sweep trace.jsonl --vary workers=1..16 users=1,2,4 --slo-ttft-ms 500    an answer for each growth in users
  understudy sweep trace.jsonl --model Llama-3.1-8B --gpu H100 --splits 6 --vary disaggregation=always,uncached:2048 \\
    --kv-link-gbps 50 --slo-ttft-ms 2000 --slo-itl-ms 20    the best split into prefill and decode workers

VALUES: a list, a..b, a..b*2 (doubling) or a..b+2 (steps); an empty value leaves the flag out; a name with a dot is a
setting, as for --set.
A request is in time within every limit of the goal (--slo-...-ms). The front are the fleets of which no cheaper one has
more requests in time.
"""
TASKS = {
    "choose the space": ("--vary", "--splits", "--workers", "--model", "--gpu", "--engine"),
    "set the goal and the prices": ("--slo-ttft-ms", "--slo-itl-ms", "--slo-e2e-ms", "--goal", "--gpu-hour"),
    "run": ("--search", "--random", "--jobs", "--store"),
    "write outputs (PATH may be -, for standard output)": ("--json", "--html", "--reports", "--manifest"),
}
EXIT_FAILED = 1
"""Exit code when every candidate failed."""
_OWN = (
    *(
        "vary",
        "splits",
        "search",
        "random",
        "optuna",
        "goal",
        "goal_window",
        "accept_unmeasured",
        "gpu_hour",
        "store",
        "jobs",
        "ray",
    ),
    *("json", "html", "reports", "manifest", "quiet", "help"),
)
_FIXED = (
    *_OWN,
    *("trace", "format", "trace_block_size", "tokenizer", "keep_ids", "clamp_input_length"),
    *("drop_surplus_hash_ids", "set", "step_times", "slo_ttft_ms", "slo_itl_ms", "slo_e2e_ms"),
    "compare_without_tiers",
)
"""Flags that a sweep does not vary: its own, those of the trace's reader, and the goal."""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy sweep`."""
    verb = verbs.add_parser(
        "sweep",
        help="find the cheapest fleet that meets a latency goal",
        description="Replay every combination of the varied flags and find the cheapest fleet that meets the goal.",
        epilog=EXAMPLES,
    )
    run_flags.add_run_flags(verb)
    sweep = verb.add_argument_group("sweep")
    sweep.add_argument(
        "--vary",
        nargs="+",
        action="extend",
        default=[],
        metavar="FLAG=VALUES",
        help="flags of `replay` to vary, and their values, such as workers=1..8 routing=round_robin,kv",
    )
    sweep.add_argument(
        "--splits",
        metavar="GPUS",
        help="vary all splits of so many GPUs into prefill and decode workers, and workers without roles; such as 8 or "
        "4,6,8",
    )
    sweep.add_argument(
        "--search",
        choices=("grid", "bisect", "halving"),
        help="grid: every combination (default up to 2,000); bisect: the smallest workers or KV blocks that meet the "
        "goal, for every combination of the other flags (default above); halving: all combinations on a part of "
        "the trace, then the best third on three times as much, and so on",
    )
    sweep.add_argument("--random", type=int, metavar="N", help="replay N combinations, drawn at random")
    sweep.add_argument(
        "--optuna",
        type=int,
        metavar="N",
        help="replay N combinations that Optuna proposes one after another (extra [optuna])",
    )
    sweep.add_argument(
        "--goal",
        type=float,
        default=GOAL,
        metavar="X",
        help=f"share of requests that must meet all objectives, such as 0.95 for 95 %% (default: {GOAL:g})",
    )
    sweep.add_argument(
        "--goal-window",
        metavar="TIME",
        help="require the goal in every window of arrivals of this length too, such as 1h or 30min",
    )
    sweep.add_argument(
        "--accept-unmeasured",
        action="store_true",
        help="vary the engine although step times were measured on one of them; a note says so",
    )
    sweep.add_argument(
        "--gpu-hour",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PRICE",
        help="price of a GPU per hour, such as H200=3.5; a number alone is for every GPU (default: count GPUs)",
    )
    sweep.add_argument(
        "--store",
        type=Path,
        metavar="PATH",
        help="file of finished candidates: a second sweep reuses them, also after a crash",
    )
    sweep.add_argument(
        "--jobs", type=int, metavar="N", help="processes, one thread each (default: all cores)"
    )
    sweep.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster instead: auto, HOST:PORT, ray://HOST:PORT or local (extra [ray])",
    )
    out = verb.add_argument_group("output (PATH may be -, for standard output)")
    out.add_argument(
        "--json", type=Path, metavar="PATH", help="write answer, front and all candidates as JSON"
    )
    out.add_argument("--html", type=Path, metavar="PATH", help="write one self-contained page with plots")
    out.add_argument(
        "--reports",
        type=Path,
        metavar="FOLDER",
        help="replay the points of the front again and write their reports there; the page of --html links to them",
    )
    out.add_argument(
        "--manifest", type=Path, metavar="PATH", help="write the Kubernetes manifest of the answer's fleet"
    )
    out.add_argument("--quiet", action="store_true", help="print no result and no progress bar")
    assert isinstance(verb, Parser)
    verb.set_defaults(parser=verb)
    verb.add_short_help("understudy sweep TRACE --vary FLAG=VALUES … [flags]", EXAMPLES, TASKS)


def run(args: argparse.Namespace) -> int:
    """Replay the candidates, then print and write the answer."""
    import sys

    from understudy.cli.splits import read_space
    from understudy.sweep.page import build_page
    from understudy.sweep.reports import write_reports
    from understudy.sweep.text import describe_sweep

    space = read_space(args)
    outputs = {"--json": args.json, "--html": args.html, "--manifest": args.manifest}
    inputs = {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(args).items()
        if name not in (*_OWN, "parser")
    }
    del inputs["--trace"]
    check_outputs(
        {**outputs, "--store": args.store}, {"TRACE": trace_flags.path_read(args), **files_named(inputs)}
    )
    if args.reports is not None and args.reports.exists() and not args.reports.is_dir():
        raise ConfigError(f"--reports {args.reports}: not a folder; name another one")
    workload = _read_workload(args)
    sweep = _sweep(args, space, workload)
    links = {} if args.reports is None else write_reports(sweep, workload, args.reports, args.html)
    contents = {
        "--json": sweep.to_json,
        "--html": lambda: build_page(sweep, links).encode(),
        "--manifest": sweep.to_manifest,
    }
    named = {flag: path for flag, path in outputs.items() if path is not None}
    if not args.quiet:
        stream = sys.stderr if any(map(is_stdout, named.values())) else sys.stdout
        for line in describe_sweep(sweep):
            print(line, file=stream)
    for flag, path in named.items():
        content = contents[flag]()
        with create(path) as file:
            file.write(content)
        if not args.quiet:
            print_written([path])
    return EXIT_FAILED if sweep.failed and not sweep.trials else 0


def _sweep(args: argparse.Namespace, space: Space, workload: Workload) -> Sweep:
    import os
    import time
    from contextlib import closing, nullcontext

    from understudy.checks import whole_number
    from understudy.cli.progress import progress_bars
    from understudy.cli.slo import read_slo
    from understudy.cli.splits import set_split
    from understudy.cli.sweep_notes import collect_notes
    from understudy.cli.sweep_search import choose_search, run_search
    from understudy.cli.varied_engines import check_engines
    from understudy.cli.vary import VariedFlags
    from understudy.cli.windows import read_window
    from understudy.run.pools import make_pools
    from understudy.sweep.candidate import Candidate
    from understudy.sweep.checkpoints import refuse_unspoken
    from understudy.sweep.local import Processes
    from understudy.sweep.on_ray import RayTasks
    from understudy.sweep.prices import Prices
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import SPLIT
    from understudy.sweep.store import Store
    from understudy.sweep.trials import Trials

    started = time.perf_counter()
    _check_flags(args)
    jobs = len(os.sched_getaffinity(0)) if args.jobs is None else whole_number("--jobs", args.jobs, 1, 4096)
    slo = read_slo(args)
    if slo is None:
        raise ConfigError("--slo-ttft-ms, --slo-itl-ms, --slo-e2e-ms: a sweep needs a goal; give one or more")
    goal_window_s = read_window(args.goal_window)
    flags = VariedFlags(args.parser, _FIXED)
    flags.check(space, args)
    prices = Prices.parse(args.gpu_hour)
    search = choose_search(args, space)
    unmeasured = check_engines(args, flags, space)

    def build(point: tuple[int, ...]) -> Candidate:
        texts = space.texts(point)
        changed = flags.apply(args, {flag: text for flag, text in texts.items() if flag != SPLIT})
        if SPLIT in texts:
            set_split(changed, texts[SPLIT])
        try:
            settings = run_flags.read_settings(changed)
        except ConfigError as error:
            words = [f"--{flag}={text}" for flag, text in texts.items()]
            raise ConfigError(replace_settings_by_flags(str(error), words, flags.names)) from None
        candidate = Candidate(
            flags=space.values(point),
            settings=settings,
            slo=slo,
            max_tokens=changed.max_tokens,
            model=changed.model or settings.model,
            kv_dtype=changed.kv_dtype or settings.kv_dtype,
            goal_window_s=goal_window_s,
        )
        prices.check(candidate)
        refuse_unspoken(candidate)
        if not settings.pools and settings.disaggregation is None:  # others are checked when they are read
            make_pools((), settings.engine, settings.workers, settings.tiers)
        return candidate

    with (
        Store(args.store) as store,
        closing(Processes(workload, jobs) if args.ray is None else RayTasks(workload, args.ray)) as runner,
        nullcontext() if args.quiet else progress_bars() as update,
    ):
        progress = None if update is None else lambda done, total: update("sweeping", done, total)
        trials = Trials(space, build, prices.cost, workload, runner, store, progress)
        run_search(trials, search, args, jobs)
    if not trials.whole and not trials.failed:
        reason = next(iter(trials.invalid.values()))
        raise ConfigError(f"--vary: every combination is invalid; the first: {reason}")
    if goal_window_s is not None and not trials.whole:
        raise ConfigError(next(iter(trials.failed.values())))
    return Sweep.build(
        trials,
        goal=args.goal,
        goal_window_s=goal_window_s,
        workload=args.trace.name,
        workload_digest=workload.digest,
        slo=slo,
        search=search,
        has_prices=prices.are_given,
        wall_s=time.perf_counter() - started,
        notes=tuple(dict.fromkeys([*unmeasured, *collect_notes(trials, workload, search, args.goal)])),
    )


def _check_flags(args: argparse.Namespace) -> None:
    """Reject flags of a run that a sweep does not support."""
    from understudy.checks import share, whole_number

    if args.engine == "qwen3" or args.step_times is not None:
        raise ConfigError("--engine qwen3: a sweep simulates vllm or sglang; choose one")
    if args.compare_without_tiers:
        raise ConfigError(
            "--compare-without-tiers: not part of a sweep; vary a tier, such as --vary g2-bytes=,64GiB"
        )
    if args.ray is not None and args.jobs is not None:
        raise ConfigError("--jobs: contradicts --ray, whose cluster has its own processes; give one")
    share("--goal", args.goal)
    if args.max_tokens is not None:
        whole_number("--max-tokens", args.max_tokens, 1)


def _read_workload(args: argparse.Namespace) -> Workload:
    from understudy.errors import InvalidArgument

    workload = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    if not len(workload):
        raise InvalidArgument(f"{args.trace} contains no requests; give another trace")
    return workload
