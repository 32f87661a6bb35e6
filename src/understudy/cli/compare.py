"""`understudy compare A.json B.json …`: saved reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli.written import print_written
from understudy.outputs import check_outputs, create, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --workers 4 --json four.json
  understudy replay trace.jsonl --workers 8 --json eight.json
  understudy compare four.json eight.json --html difference.html
  understudy replay trace.jsonl --workers 4 --users 2 --json grown.json
  understudy compare four.json grown.json --accept-different-workloads    what twice the users change
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy compare`."""
    verb = verbs.add_parser(
        "compare",
        help="show saved reports side by side",
        description="Show how saved reports differ in their configuration and in their results.",
        epilog=EXAMPLES,
    )
    verb.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="files that --json wrote")
    verb.add_argument(
        "--html", type=Path, metavar="PATH", help="write one self-contained page; -: standard output"
    )
    verb.add_argument(
        "--accept-different-workloads",
        action="store_true",
        help="show runs of different workloads side by side; none is called best",
    )
    verb.add_argument(
        "--accept-unmeasured",
        action="store_true",
        help="compare engines by step times that were measured on one of them; the conclusion says so",
    )


def run(args: argparse.Namespace) -> int:
    """Print the comparison table; with --html, write the page too."""

    from rich.console import Console

    from understudy.report.compare import compare

    check_outputs({"--html": args.html}, {f"REPORT {path}": path for path in args.reports})
    comparison = compare(
        *args.reports,
        accept_different_workloads=args.accept_different_workloads,
        accept_unmeasured=args.accept_unmeasured,
    )
    if args.html is not None:
        with create(args.html) as file:
            file.write(comparison.to_html().encode())
        print_written([args.html])
    to_stdout = args.html is not None and is_stdout(args.html)
    comparison.print(Console(highlight=False, stderr=to_stdout))
    return 0
