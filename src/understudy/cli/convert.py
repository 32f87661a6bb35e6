"""`understudy convert TRACE OUT`: convert request logs and other traces to JSONL without text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli import log_flags, trace_flags
from understudy.outputs import check_outputs

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs
    from understudy.workload import Workload

EXAMPLES = """\
examples:
  understudy convert requests.jsonl trace.jsonl
  understudy convert litellm.jsonl trace.jsonl --time startTime --where status=success --busiest 1h
  understudy convert month.csv trace.jsonl --columns time=request_time,input=prompt_tokens,output=completion_tokens
  understudy convert requests.jsonl trace.jsonl.gz --format openai --tokenizer tokenizer.json
  understudy convert agents.jsonl plays.jsonl --format weka --to agentic-mooncake
  understudy convert AzureLLMInferenceTrace_conv.csv trace.jsonl --format azure
  understudy replay trace.jsonl --trace-block-size 16 --workers 4

The output contains no text: each prompt becomes a list of ids for keyed hashes of its prefixes. Request ids are
dropped unless you give --keep-ids. A log of lengths alone becomes rows of lengths, which are small.
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy convert`."""
    verb = verbs.add_parser(
        "convert",
        help="turn a log or another trace into a Mooncake trace, without its text",
        description="Read a trace of any known format and write it, without its text, as Mooncake JSONL or a graph.",
        epilog=EXAMPLES,
    )
    verb.add_argument("trace", type=Path, metavar="TRACE", help="file to read; -: standard input")
    verb.add_argument(
        "out", type=Path, metavar="OUT", help="file to write (.gz: gzipped); -: standard output"
    )
    verb.add_argument(
        "--to",
        choices=("mooncake", "lengths", "agentic-mooncake"),
        help="format to write (default: mooncake; lengths for a log without content; agentic-mooncake for requests "
        "that wait for one another)",
    )
    trace_flags.add_trace_flags(verb)
    log_flags.add_log_flags(verb)
    log_flags.add_window_flags(verb)


def run(args: argparse.Namespace) -> int:
    """Convert the trace; print the information that was lost on standard error."""
    import sys

    from understudy.cli.progress import progress_bars
    from understudy.errors import InvalidArgument
    from understudy.text import plural
    from understudy.workload import write_agentic_mooncake, write_mooncake
    from understudy.workload.guess import guess_format
    from understudy.workload.length_rows import write_lengths
    from understudy.workload.progress import reporting_progress

    check_outputs({"OUT": args.out}, {"TRACE": trace_flags.path_read(args), "--tokenizer": args.tokenizer})
    with progress_bars() as report_progress, reporting_progress(report_progress):
        workload = trace_flags.read_workload(args.trace, args.format, log_flags.reader_options(args))
        if not len(workload):
            raise InvalidArgument(f"{args.trace} contains no requests; give a trace with at least one")
        workload = log_flags.cut(args, workload)
        target = args.to or _choose_target(workload)
        if target == "lengths":
            write_lengths(workload, args.out)
        elif target == "mooncake":
            write_mooncake(workload, args.out)
        else:
            source = args.format or guess_format(args.trace) or "mooncake"
            write_agentic_mooncake(workload, args.out, source)
    sessions = "" if workload.sessions == len(workload) else f" in {plural(workload.sessions, 'session')}"
    print(
        f"{log_flags.describe_format(args)}{plural(len(workload), 'request')}{sessions}, "
        f"{workload.total_prompt_tokens:,} prompt tokens, "
        f"{workload.total_output_tokens:,} output tokens; replay "
        + (f"with --trace-block-size {workload.trace_block_size}" if target == "mooncake" else f"{args.out}")
        + ("" if workload.has_arrivals else " --concurrency N (no timestamps)"),
        file=sys.stderr,
    )
    for note in workload.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _choose_target(workload: Workload) -> str:
    """Return the format to write: rows of lengths if there is no more, else one with content."""
    from understudy.workload.length_rows import is_lengths_only

    if workload.graph is not None:
        return "agentic-mooncake"
    return "lengths" if is_lengths_only(workload) else "mooncake"
