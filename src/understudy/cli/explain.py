"""`understudy explain RUN`: where the latency of requests went, by parts that add up to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.outputs import check_outputs, create, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --workers 4 --save-run run.npz
  understudy explain run.npz                     the 20 slowest requests, and their parts together
  understudy explain run.npz --request 17        one request, by its id or row
  understudy explain run.npz --misses            why prompt tokens were not in the cache, by cause
  understudy explain run.npz --slowest 100 --json - | jq .parts
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy explain`."""
    verb = verbs.add_parser(
        "explain",
        help="say why requests of a saved run were slow",
        description="Split latencies of a saved run into parts that add up to them: waits and which requests "
        "held the blocks, chunks, preemptions, loads, and steps lengthened by other requests.",
        epilog=EXAMPLES,
    )
    verb.add_argument("run", type=Path, metavar="RUN", help="file that `replay --save-run` wrote")
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--request", metavar="ID", help="explain one request: its id in the trace, or its row")
    which.add_argument(
        "--slowest", type=int, metavar="N", default=20, help="explain the N slowest requests (default: 20)"
    )
    verb.add_argument(
        "--misses", action="store_true", help="also say why prompt tokens were not in the cache, by cause"
    )
    verb.add_argument(
        "--json", type=Path, metavar="PATH", help="write JSON (docs/schema/explain.json); -: standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation; with --json, write it too."""
    import msgspec
    from rich.console import Console

    from understudy.errors import InvalidArgument
    from understudy.explain.describe import explain_requests
    from understudy.explain.saved_run import read_run
    from understudy.explain.text import print_explanation
    from understudy.explain.waterfall import Waterfalls

    check_outputs({"--json": args.json}, {"RUN": args.run})
    if args.slowest < 1:
        raise InvalidArgument(f"--slowest must be at least 1, got {args.slowest}")
    saved = read_run(args.run)
    rows = [saved.find(args.request)] if args.request is not None else Waterfalls(saved).slowest(args.slowest)
    explained = explain_requests(saved, rows, misses=args.misses)
    if not explained["requests"]:
        which = "no request" if args.request is None else f"request {args.request} did not arrive, and so"
        raise InvalidArgument(f"{args.run}: {which} ended; there is no latency to explain")
    if args.json is not None:
        with create(args.json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(explained), indent=2) + b"\n")
    if args.json is None or not is_stdout(args.json):
        print_explanation(explained, Console(highlight=False, markup=False))
    return 0
