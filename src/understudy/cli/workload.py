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
  understudy workload synthetic --rate 5 --isl 2000 --osl 200 --count 1000 -o load.jsonl
  understudy workload synthetic --rate 2 --isl 800 --osl 200 --turns 4 --system-prompts 3x1024 -o chat.jsonl
  understudy workload synthetic --spec spec.yaml -o load.jsonl
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
        choices=("fanout", "turns", "agents", "synthetic"),
        help="fanout: several simultaneous questions about one context; turns: conversations with short pauses; "
        "agents: plays with the shape of public traces of 2026, as agentic-mooncake; synthetic: requests of the "
        "lengths and at the rate that you give",
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
        help="contexts (default: 700), sessions (default: 400; synthetic: 100) or plays (default: 100)",
    )
    verb.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the times and lengths (default: 0)"
    )
    made = verb.add_argument_group("synthetic")
    made.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="sessions per second, a Poisson process (default: all at once)",
    )
    made.add_argument("--isl", type=int, metavar="N", help="mean tokens of a first prompt")
    made.add_argument("--osl", type=int, metavar="N", help="mean tokens of an answer")
    made.add_argument(
        "--spread",
        type=float,
        metavar="X",
        help="standard deviation of lengths as a share of the mean (default: 0.5)",
    )
    made.add_argument("--turns", type=int, metavar="N", help="turns of a session (default: 1)")
    made.add_argument(
        "--followup", type=int, metavar="N", help="mean new tokens of later turns (default: --isl / 4)"
    )
    made.add_argument(
        "--think-time-ms", type=float, metavar="MS", help="mean pause before a later turn (default: 0)"
    )
    made.add_argument(
        "--system-prompts",
        metavar="GxN",
        help="G system prompts of N tokens, one of which begins each session",
    )
    made.add_argument(
        "--spec",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with the fields of SyntheticSpec, instead of these flags",
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

    check_outputs({"--output": args.output}, {} if args.spec is None else {"--spec": args.spec})
    seed = whole_number("--seed", args.seed)
    count = None if args.count is None else whole_number("--count", args.count, 1, 10_000_000)
    if args.kind == "synthetic":
        from understudy.cli.synthetic_flags import read_spec
        from understudy.workload.synthetic import synthesise

        made = synthesise(read_spec(args, count, seed))
        write_mooncake(made, args.output)
        name = "" if is_stdout(args.output) else f"written: {visible(str(args.output))} "
        block_size = made.trace_block_size
        print(
            f"{name}({plural(len(made), 'request')}; replay with --trace-block-size {block_size})",
            file=sys.stderr,
        )
        return 0
    _reject_synthetic_flags(args)
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


_SYNTHETIC = ("rate", "isl", "osl", "spread", "turns", "followup", "think_time_ms", "system_prompts", "spec")


def _reject_synthetic_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag of another kind of workload."""
    from understudy.errors import ConfigError

    for name in _SYNTHETIC:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for `workload synthetic`, not {args.kind}; leave it out")
