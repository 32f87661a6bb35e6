"""`understudy load URL`: send load to any OpenAI-compatible endpoint, at rates, from users, or as a trace has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import trace_flags
from understudy.cli.written import print_written
from understudy.defaults import GOAL
from understudy.outputs import check_outputs, create, is_stdout
from understudy.text import visible

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from understudy.cli.verbs import Verbs
    from understudy.online.completions import Endpoint
    from understudy.online.load_result import LoadResult
    from understudy.report.goodput import Slo
    from understudy.workload import Workload

EXAMPLES = """\
examples:
  understudy load http://127.0.0.1:8000 --model my-model --rate 1,2,4,8 --isl 1000 --osl 200
  understudy load http://127.0.0.1:8000 --model my-model --rate knee --isl 1000 --osl 200 --slo-ttft-ms 500
  understudy load http://127.0.0.1:8000 --model my-model --users 16 --isl 1000 --osl 200 --requests-jsonl bench.jsonl
  understudy load http://127.0.0.1:8000 trace.jsonl --model my-model --arrival-rate-scale 2
  understudy calibrate bench.jsonl --model Llama-3.1-8B --gpu H100 -o timing.yaml

--rate is an open loop: requests come as a Poisson process, however busy the endpoint is. --users is a closed one: each
user sends the next request when the answer to the last one ended. Token counts are the endpoint's own where it reports
usage. Prompts are token ids; --chat sends words to endpoints that accept none. A key is read from OPENAI_API_KEY.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy load`."""
    verb = verbs.add_parser(
        "load",
        help="send load to an endpoint and measure it, up to its knee",
        description="Send requests to an OpenAI-compatible endpoint in real time and report what its clients see.",
        epilog=EXAMPLES,
    )
    verb.add_argument("url", metavar="URL", help="endpoint, such as http://127.0.0.1:8000")
    verb.add_argument(
        "trace",
        type=Path,
        nargs="?",
        metavar="TRACE",
        help="trace whose requests are sent; -: standard input",
    )
    verb.add_argument("--model", required=True, metavar="NAME", help="model that the requests name")
    load = verb.add_argument_group("load")
    load.add_argument(
        "--rate",
        metavar="R,…",
        help="requests per second, one load after another; knee: search the highest rate that is served",
    )
    load.add_argument("--users", metavar="N,…", help="users at a time, one load after another, or knee")
    load.add_argument(
        "--first", type=float, metavar="X", help="first load of a search for the knee (default: 1)"
    )
    load.add_argument(
        "--arrival-rate-scale", type=float, metavar="X", help="divide the times of TRACE by X (default: 1)"
    )
    load.add_argument("--isl", type=int, metavar="N", help="longest prompt, tokens (without TRACE)")
    load.add_argument("--osl", type=int, metavar="N", help="longest answer, tokens (without TRACE)")
    load.add_argument(
        "--least-length",
        type=float,
        metavar="X",
        help="shortest length as a share of the longest (default: 0.8)",
    )
    load.add_argument(
        "--num-prompts", type=int, metavar="N", help="requests of each load (default: 100, or 10 per user)"
    )
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of lengths and times (default: 0)"
    )
    goal = verb.add_argument_group("goal")
    goal.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="longest time to the first token")
    goal.add_argument("--slo-itl-ms", type=float, metavar="MS", help="longest mean time between tokens")
    goal.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="longest time of a whole request")
    goal.add_argument(
        "--goal", type=float, default=GOAL, metavar="X", help=f"share of requests in time (default: {GOAL:g})"
    )
    to = verb.add_argument_group("requests")
    to.add_argument(
        "--vocabulary",
        type=int,
        default=32_000,
        metavar="N",
        help="prompts are token ids below N (default: 32000); at most the model's vocabulary",
    )
    to.add_argument("--chat", action="store_true", help="send chat messages of words instead of token ids")
    to.add_argument(
        "--no-ignore-eos",
        action="store_true",
        help="let answers end on their own, for endpoints that refuse ignore_eos",
    )
    to.add_argument(
        "--timeout-s",
        type=float,
        default=3600.0,
        metavar="S",
        help="longest time of a request (default: 3600)",
    )
    out = verb.add_argument_group("output")
    out.add_argument(
        "--requests-jsonl",
        type=Path,
        metavar="FILE",
        help="write a line per request of the last load, for calibrate",
    )
    out.add_argument("--json", type=Path, metavar="PATH", help="write all loads as JSON; -: standard output")
    trace_flags.add_trace_flags(verb)


def run(args: argparse.Namespace) -> int:
    """Send the loads one after another; print a line for each, the knee, and write the files."""
    import os

    import msgspec

    from understudy.cli.slo import read_slo
    from understudy.errors import ConfigError, WrongState
    from understudy.online.completions import Endpoint
    from understudy.online.knee import find_knee
    from understudy.online.load_result import SCHEMA
    from understudy.workload.files import create_trace

    read = {} if args.trace is None else {"TRACE": trace_flags.path_read(args)}
    check_outputs({"--requests-jsonl": args.requests_jsonl, "--json": args.json}, read)
    _check(args)
    kind, levels = _read_levels(args)
    endpoint = Endpoint(
        url=args.url,
        model=args.model,
        vocabulary=args.vocabulary,
        timeout_s=args.timeout_s,
        api_key=os.environ.get("OPENAI_API_KEY"),
        chat=args.chat,
        ignore_eos=not args.no_ignore_eos,
    )
    slo = read_slo(args)
    trace = None
    if args.trace is not None:
        trace = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    measure = _make_measure(args, endpoint, kind, trace, slo)
    knee: float | None = None
    results: list[LoadResult] = []
    if levels is None:
        if args.goal is not None and not 0 < args.goal <= 1:
            raise ConfigError(f"--goal must be above 0 and at most 1, got {args.goal:g}")
        if args.first is not None and kind == "users" and (args.first < 1 or args.first % 1):
            raise ConfigError(f"--first must be whole users, at least 1, got {args.first:g}")
        knee, results = find_knee(measure, args.first or 1.0, args.goal, whole=kind == "users")
    else:
        results = [measure(level) for level in levels]
    last = results[-1] if knee is None else next(one for one in results if one.level == knee)
    if not any(one.requests - one.failed for one in results):
        raise WrongState(f"no request was answered ({results[0].first_error}); check URL and --model")
    if args.requests_jsonl is not None:
        with create_trace(args.requests_jsonl) as file:
            file.write(msgspec.json.Encoder().encode_lines(last.rows))
    if args.json is not None:
        content = {
            "schema": SCHEMA,
            "url": args.url,
            "model": args.model,
            "kind": kind,
            "knee": None if _is_open(knee, results) else knee,
            "loads": [one.to_dict() for one in results],
        }
        with create(args.json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if args.json is None or not is_stdout(args.json):
        _print(results, levels is None, knee, kind, last)
        print_written([args.requests_jsonl, args.json])
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that contradict each other."""
    from understudy.checks import share, whole_number
    from understudy.errors import ConfigError

    if args.rate is not None and args.users is not None:
        raise ConfigError("--rate and --users are two loads; give one")
    if args.trace is None:
        if args.rate is None and args.users is None:
            raise ConfigError("--rate, --users, TRACE: no load is described; give one")
        for flag, value in (("--isl", args.isl), ("--osl", args.osl)):
            if value is None:
                raise ConfigError(
                    f"{flag}: missing; a load without TRACE needs lengths, such as --isl 1000 --osl 200"
                )
            whole_number(flag, value, 1, 10_000_000)
        if args.arrival_rate_scale is not None:
            raise ConfigError("--arrival-rate-scale is for TRACE; leave it out")
    else:
        given = {
            "--isl": args.isl,
            "--osl": args.osl,
            "--least-length": args.least_length,
            "--rate": args.rate,
        }
        if named := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(f"{named[0]}: TRACE has its own requests and times; leave it out")
    if args.least_length is not None:
        share("--least-length", args.least_length)
    if args.num_prompts is not None:
        whole_number("--num-prompts", args.num_prompts, 1, 10_000_000)
    if not args.timeout_s > 0:
        raise ConfigError(f"--timeout-s must be above 0, got {args.timeout_s:g}")
    searches = "knee" in (args.rate, args.users)
    if args.first is not None and not searches:
        raise ConfigError("--first is for `--rate knee` and `--users knee`; leave it out")
    if args.first is not None and not 0 < args.first <= 1e6:
        raise ConfigError(f"--first must be above 0, got {args.first:g}")


def _read_levels(args: argparse.Namespace) -> tuple[str, list[float | None] | None]:
    """Return what levels count (`rate`, `users` or `trace`), and the levels; None: search the knee."""
    from understudy.errors import ConfigError

    if args.rate is None and args.users is None:
        return "trace", [None]
    kind = "rate" if args.rate is not None else "users"
    text = args.rate if kind == "rate" else args.users
    if text == "knee":
        return kind, None
    try:
        levels = [float(part) if kind == "rate" else float(int(part)) for part in text.split(",")]
    except ValueError:
        levels = [-1.0]
    if not all(0 < level <= 1e6 for level in levels):
        example = "0.5,1,2 requests per second" if kind == "rate" else "1,4,16 users"
        raise ConfigError(f"--{kind}: {text!r} is not a list of numbers above 0; write {example}, or knee")
    return kind, list(levels)


def _make_measure(
    args: argparse.Namespace, endpoint: Endpoint, kind: str, trace: Workload | None, slo: Slo | None
) -> Callable[[float | None], LoadResult]:
    """Return the function that sends one load."""
    from understudy.cli.progress import progress_bar
    from understudy.online.load import draw_requests, run_load
    from understudy.online.load_result import LoadResult
    from understudy.text import plural

    runs = 0

    def measure(level: float | None) -> LoadResult:
        nonlocal runs
        users = int(level) if kind == "users" and level is not None else None
        if trace is None:
            count = args.num_prompts or (100 if users is None else 10 * users)
            least = 0.8 if args.least_length is None else args.least_length
            rate = level if kind == "rate" else None
            workload = draw_requests(
                args.isl, args.osl, count, rate=rate, least=least, seed=args.seed, run=runs
            )
        else:
            workload = trace if args.num_prompts is None else trace.head(args.num_prompts)
            scale = 1.0 if args.arrival_rate_scale is None else args.arrival_rate_scale
            workload = workload.scale_arrival_rate(scale)
        runs += 1
        label = (
            "trace"
            if level is None
            else f"{level:g} requests/s"
            if kind == "rate"
            else plural(int(level), "user")
        )
        with progress_bar(label, len(workload), "requests") as progress:
            found = run_load(endpoint, workload, users=users, progress=progress)
        return LoadResult.of(workload, found, label, level, slo)

    return measure


def _is_open(knee: float | None, results: list[LoadResult]) -> bool:
    """Whether the highest load of a search was served: the knee lies above it."""
    return knee is not None and knee == max(one.level for one in results if one.level is not None)


def _print(
    results: list[LoadResult], searched: bool, knee: float | None, kind: str, last: LoadResult
) -> None:
    if searched:
        unit = "requests/s" if kind == "rate" else "users"
        if knee is None:
            print(f"Knee: below {results[0].label}; start lower with --first\n")
        elif _is_open(knee, results):
            print(f"Knee: not found, above {last.label}; send more requests (--num-prompts)\n")
        else:
            print(f"Knee: {knee:g} {unit}, {last.output_tokens_per_s:,.0f} output tokens/s\n")
    has_goal = any(one.in_time is not None for one in results)
    head = ["load", "answered", "failed", *(["in time"] if has_goal else [])]
    head += ["TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "requests/s", "output tokens/s"]
    rows = [head]
    for one in results:
        cells = [one.label, f"{one.requests - one.failed:,}", f"{one.failed:,}"]
        if has_goal:
            cells.append("–" if one.in_time is None else f"{one.in_time:.1%}")
        cells += [_ms(one.ttft_ms.p50), _ms(one.ttft_ms.p99), _ms(one.tpot_ms.p50), _ms(one.tpot_ms.p99)]
        rows.append([*cells, f"{one.requests_per_s:.2f}", f"{one.output_tokens_per_s:,.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *padded]))
    for one in results:
        for note in one.notes():
            print(f"note: {visible(note)}")


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:,.1f}"
