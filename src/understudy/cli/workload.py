"""`understudy workload KIND -o FILE`: write a synthetic workload as a Mooncake trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.outputs import check_outputs, is_stdout

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy workload fanout -o fanout.jsonl.gz
  understudy workload turns --count 100 --seed 7 -o turns.jsonl
  understudy workload agents --count 100 -o agents.jsonl.gz
  understudy replay fanout.jsonl.gz --workers 16 --routing kv --event-delay-ms 500
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy workload`."""
    verb = verbs.add_parser(
        "workload",
        help="write a synthetic workload on which routing matters",
        description="Write a workload whose prefixes are reused within seconds, as a Mooncake trace.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "kind",
        choices=("fanout", "turns", "agents"),
        help="fanout: several simultaneous questions about one context; turns: conversations with short pauses; "
        "agents: plays with the shape of public traces of 2026, as agentic-mooncake",
    )
    verb.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="file to write (.gz: gzipped); -: standard output",
    )
    verb.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="contexts (default: 700), sessions (default: 400) or plays (default: 100)",
    )
    verb.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the times and lengths (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate the workload and write it."""
    import sys

    from msgspec.structs import replace

    from understudy.checks import whole_number
    from understudy.text import plural, visible
    from understudy.workload.agents.mooncake import write_agentic_mooncake
    from understudy.workload.agents.synthetic import AGENT_PRESETS, synthesise_agents
    from understudy.workload.families import FanOut, QuickTurns
    from understudy.workload.write import write_mooncake

    check_outputs({"--output": args.output}, {})
    seed = whole_number("--seed", args.seed)
    count = None if args.count is None else whole_number("--count", args.count, 1, 10_000_000)
    if args.kind == "agents":
        spec = AGENT_PRESETS["agents-2026"]
        plays = synthesise_agents(spec if count is None else replace(spec, plays=count), seed=seed)
        write_agentic_mooncake(plays, args.output)
        name = "" if is_stdout(args.output) else f"written: {visible(str(args.output))} "
        print(f"{name}({plural(len(plays), 'request')})", file=sys.stderr)
        return 0
    workload = (
        (FanOut(seed=seed) if count is None else FanOut(seed=seed, contexts=count)).build()
        if args.kind == "fanout"
        else (QuickTurns(seed=seed) if count is None else QuickTurns(seed=seed, sessions=count)).build()
    )
    write_mooncake(workload, args.output)
    name = "" if is_stdout(args.output) else f"written: {visible(str(args.output))} "
    print(
        f"{name}({plural(len(workload), 'request')}; replay with --trace-block-size {workload.trace_block_size})",
        file=sys.stderr,
    )
    return 0
