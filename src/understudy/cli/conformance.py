"""`understudy conformance vllm DIR`: does the engine schedule, step by step, as the real one was recorded to?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.cli import Verbs

EXAMPLES = """\
examples:
  understudy conformance vllm tests/golden/vllm
  understudy conformance vllm recordings --only 'async_*' --vllm-version v0.27

DIR holds scenarios/NAME.json and golden/NAME.jsonl.gz for every NAME.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy conformance`."""
    import argparse

    verb = verbs.add_parser(
        "conformance",
        help="compare the engine with recorded schedules, step by step",
        description="Run every scenario of a directory and compare each step with what the real scheduler did.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument("engine", choices=["vllm"], help="whose scheduler was recorded")
    verb.add_argument("directory", type=Path, metavar="DIR", help="scenarios/ and golden/")
    verb.add_argument(
        "--only", default="*", metavar="GLOB", help="scenarios whose name matches (default: all)"
    )
    verb.add_argument(
        "--vllm-version", default="recorded", metavar="NAME", help="version profile (default: recorded)"
    )
    verb.add_argument(
        "--check", action="store_true", help="verify the engine's invariants after every step too"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line a scenario and the first difference of each that differs; 1 if any does."""
    from rich.console import Console
    from rich.markup import escape

    from understudy.engines.conformance import compare_all
    from understudy.engines.profiles import profile_named

    console = Console(highlight=False, soft_wrap=True)
    failed = steps = total = 0
    for outcome in compare_all(
        args.directory, profile_named(args.vllm_version), only=args.only, check=args.check
    ):
        total += 1
        steps += outcome.steps
        if outcome.difference is None:
            console.print(f"[green]same[/]    {outcome.name}  {outcome.steps} steps")
        else:
            failed += 1
            console.print(f"[red]differs[/] {outcome.name}  {escape(outcome.difference)}")
    console.print(f"{total - failed} of {total} scenarios identical, {steps} steps compared")
    return 1 if failed else 0
