"""`understudy doctor TRACE`: say what is odd about a trace before it is replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.cli import log_flags, run_flags, trace_flags

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy doctor trace.jsonl --model Qwen3-32B
  understudy doctor requests.jsonl --format openai

It prints what the trace has, then one line per odd property: no times, clocks that run backwards, bursts, gaps, one
session, equal lengths, no shared prefixes, lengths above the model's.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy doctor`."""
    verb = verbs.add_parser(
        "doctor",
        help="say what is odd about a trace before it is replayed",
        description="Read a trace of any known format and list what is odd about it.",
        epilog=EXAMPLES,
    )
    run_flags.add_trace(verb)
    log_flags.add_log_flags(verb)
    verb.add_argument(
        "--model", metavar="NAME", help="known model name, or path of a config.json, for its context"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from understudy.timing.contexts import known_context
    from understudy.workload.doctor import describe_trace, examine

    workload = trace_flags.read_workload(args.trace, args.format, log_flags.reader_options(args))
    context = None if args.model is None else known_context(args.model)
    print(f"{log_flags.describe_format(args)}{describe_trace(workload)}")
    found = examine(workload, context)
    for each in found:
        print(f"▲ {each.name}: {each.text}")
    if not found:
        print("✓ nothing is odd")
    for note in workload.notes:
        print(f"note: {note}")
    return 0
