"""`understudy plan LOG --model M --gpu A,B --slo-…`: the cheapest fleet, without a space given by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import run_flags, trace_flags
from understudy.cli.parser import Parser
from understudy.cli.written import print_written
from understudy.defaults import GOAL

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy plan day.jsonl --model Qwen3-32B --gpu H100,H200 --slo-ttft-ms 2000 --slo-tpot-ms 50
  understudy plan day.jsonl --model Qwen3-32B --gpu H200,B200 --slo-ttft-ms 2000 --slo-tpot-ms 50 --users 2 \\
    --price prices.yaml --out plan        write commands, a Kubernetes manifest and a page; the same again continues

prices.yaml has a line per GPU: H200: 3.5 ($ per GPU hour). A plan chooses the engine (where its step times were
measured), tensor parallelism, data parallelism with whole experts, workers, routing, chunk sizes, host memory
(--host-gib), and prefill and decode workers. `sweep` replays a space of your own.
"""
TASKS = {
    "name the model and its GPUs": ("--model", "--gpu", "--users"),
    "set the goal and the prices": ("--slo-ttft-ms", "--slo-tpot-ms", "--slo-e2e-ms", "--goal", "--price"),
    "limit the fleets": ("--most-gpus", "--node-gpus", "--host-gib", "--no-splits", "--set"),
    "run": ("--jobs", "--store", "--most-cpu-s"),
    "write outputs": ("--out", "--json"),
}


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy plan`."""
    verb = verbs.add_parser(
        "plan",
        help="find the cheapest fleet for a log, with its bill and what changes it",
        description="Choose the space, find the cheapest fleet that meets a goal, and say how sure the answer is.",
        epilog=EXAMPLES,
    )
    run_flags.add_trace(verb)
    what = verb.add_argument_group("model and GPUs")
    what.add_argument("--model", metavar="NAME", help="known model name, or path of a config.json")
    what.add_argument("--gpu", metavar="NAMES", help="GPUs to choose from, such as H100,H200")
    what.add_argument("--kv-dtype", metavar="TYPE", help="type of the KV cache, such as fp8")
    run_flags.add_users(what.add_argument)
    goal = verb.add_argument_group("goal and prices")
    goal.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="longest time to the first token")
    goal.add_argument(
        "--slo-tpot-ms",
        dest="slo_itl_ms",
        type=float,
        metavar="MS",
        help="longest mean time between the tokens of a request",
    )
    goal.add_argument(
        "--slo-itl-ms", type=float, metavar="MS", help="the same limit, as `sweep` and `replay` name it"
    )
    goal.add_argument("--slo-e2e-ms", type=float, metavar="MS", help="longest time of a whole request")
    goal.add_argument(
        "--goal", type=float, default=GOAL, metavar="X", help=f"share of requests in time (default: {GOAL:g})"
    )
    goal.add_argument(
        "--goal-window",
        metavar="TIME",
        help="require the goal in every window of this length (default: 1h if the log spans two)",
    )
    goal.add_argument(
        "--price",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with $ per GPU hour by name (default: assumed)",
    )
    goal.add_argument(
        "--gpu-hour", nargs="+", action="extend", default=[], metavar="NAME=PRICE", help="the same as flags"
    )
    limits = verb.add_argument_group("fleets")
    limits.add_argument(
        "--most-gpus", type=int, default=64, metavar="N", help="GPUs of a fleet (default: 64)"
    )
    limits.add_argument(
        "--node-gpus", type=int, default=8, metavar="N", help="GPUs of the largest engine (default: 8)"
    )
    limits.add_argument(
        "--host-gib",
        type=int,
        metavar="GIB",
        help="host memory per GPU that may hold KV blocks (default: none)",
    )
    limits.add_argument("--no-splits", action="store_true", help="try no prefill and decode workers")
    limits.add_argument(
        "--kv-link-gbps",
        type=float,
        default=50.0,
        metavar="X",
        help="link of each worker for hand-offs, 10^9 bytes per second (default: 50)",
    )
    limits.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="one setting that all fleets share"
    )
    how = verb.add_argument_group("run")
    how.add_argument("--jobs", type=int, metavar="N", help="processes, one thread each (default: all cores)")
    how.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster instead (extra [ray])")
    how.add_argument(
        "--store", type=Path, metavar="PATH", help="file of finished replays: the same plan again continues"
    )
    how.add_argument(
        "--most-cpu-s",
        type=float,
        default=60.0,
        metavar="S",
        help="CPU time after which no more fleets and changes are tried, answer or not (default: 60)",
    )
    out = verb.add_argument_group("output")
    out.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write commands.sh, fleet.yaml, plan.html, plan.json, and the store",
    )
    out.add_argument("--json", type=Path, metavar="PATH", help="write the plan as JSON; -: standard output")
    out.add_argument("--quiet", action="store_true", help="print no result and no progress bar")
    assert isinstance(verb, Parser)
    verb.add_short_help("understudy plan LOG --model M --gpu A,B --slo-ttft-ms MS [flags]", EXAMPLES, TASKS)


def run(args: argparse.Namespace) -> int:
    """Find the plan, print it and write its files."""
    import sys
    from contextlib import nullcontext
    from dataclasses import replace

    from understudy.cli.progress import progress_bars
    from understudy.cli.slo import read_slo
    from understudy.cli.windows import read_window
    from understudy.errors import ConfigError
    from understudy.outputs import check_outputs, create, is_stdout
    from understudy.planning.files import make_folder, write_files
    from understudy.planning.find import find_plan
    from understudy.planning.price_list import PriceList
    from understudy.planning.question import Question, read_gpus
    from understudy.planning.text import describe_plan

    slo = read_slo(args)
    if slo is None:
        raise ConfigError("--slo-ttft-ms, --slo-tpot-ms, --slo-e2e-ms: a plan needs a goal; give one or more")
    for flag, value, example in (("--model", args.model, "Qwen3-32B"), ("--gpu", args.gpu, "H100,H200")):
        if value is None:
            raise ConfigError(
                f"{flag}: missing; a plan needs a model and the GPUs to choose from, such as {example}"
            )
    inputs = {"TRACE": trace_flags.path_read(args), "--price": args.price, "--tokenizer": args.tokenizer}
    check_outputs({"--json": args.json, "--store": args.store}, inputs)
    store = args.store or (None if args.out is None else make_folder(args.out))
    gpus = read_gpus(args.gpu)
    question = Question(
        model=args.model,
        gpus=gpus,
        slo=slo,
        prices=PriceList.read(gpus, args.price, args.gpu_hour),
        goal=args.goal,
        goal_window_s=read_window(args.goal_window),
        kv_dtype=args.kv_dtype,
        most_gpus=args.most_gpus,
        node_gpus=args.node_gpus,
        host_gib=args.host_gib,
        splits=not args.no_splits,
        link_gbps=args.kv_link_gbps,
        assignments=tuple(args.set),
    )
    workload = trace_flags.read_workload(args.trace, args.format, trace_flags.reader_options(args))
    with nullcontext() if args.quiet else progress_bars() as update:
        plan = find_plan(
            workload,
            question,
            name=args.trace.name,
            users=1.0 if args.users is None else args.users,
            store=store,
            jobs=args.jobs,
            ray=args.ray,
            most_cpu_s=args.most_cpu_s,
            progress=update,
        )
    if args.out is None and not args.quiet:
        hint = "--out FOLDER writes commands.sh, fleet.yaml (Kubernetes) and a page, and continues a stopped plan"
        plan = replace(plan, notes=(*plan.notes, hint))
    if not args.quiet:
        stream = sys.stderr if args.json is not None and is_stdout(args.json) else sys.stdout
        for line in describe_plan(plan):
            print(line, file=stream)
    written = [] if args.out is None else write_files(plan, args.out)
    if args.json is not None:
        with create(args.json) as file:
            file.write(plan.to_json())
        written.append(args.json)
    if not args.quiet:
        print_written(written)
    return 0
