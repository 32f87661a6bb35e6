"""The `understudy` command: one module per verb; `main` parses, runs the verb and maps errors to exit codes.

A verb module has `add_parser(verbs)`, which adds its arguments, and `run(args)`, which returns the exit code.
Modules import their dependencies inside `run`, so that `--help` stays fast.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from understudy.cli import (
    accuracy,
    agents,
    cache,
    calibrate,
    capacity,
    compare,
    completion,
    conformance,
    convert,
    demo,
    diff,
    doctor,
    events,
    explain,
    fleet,
    load,
    plan,
    predict,
    qwen3,
    replay,
    router,
    serve,
    sweep,
    tokenizer,
    workload,
)
from understudy.cli.flag_names import replace_settings_by_flags
from understudy.cli.parser import Parser
from understudy.cli.verbs import list_verbs
from understudy.errors import PolicyError, UnderstudyError
from understudy.text import visible
from understudy.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from understudy.cli.verbs import Verb

EXIT_ERROR = 2  # bad usage or a typed error; anything else is a defect and shows its traceback
EXIT_INTERRUPTED = 130
TRACEBACK = "UNDERSTUDY_TRACEBACK"
"""Environment variable: set it to see the full traceback of errors raised by a user-defined router."""

EXAMPLES = """\
examples:
  understudy plan log.jsonl --model Qwen3-32B --gpu H100,H200 --slo-ttft-ms 2000 --slo-tpot-ms 50
  understudy replay trace.jsonl --workers 4 --html report.html
  understudy compare four.json eight.json
  understudy sweep trace.jsonl --vary workers=1..8 --slo-ttft-ms 500
  understudy explain run.npz --slowest 20
  understudy convert requests.jsonl trace.jsonl --where status=200 --busiest 1h
  understudy doctor trace.jsonl      say what is odd about a trace
  understudy serve my-model --port 8000
  understudy conformance vllm tests/golden/vllm
  understudy events verify recorded.jsonl --stream raw
  understudy demo                    show block allocation, reuse and eviction in one table
  understudy demo --policy vllm      the same, with vLLM's eviction order
  understudy completion bash         print a completion script for the shell
  understudy VERB --help             describe a verb and its flags
"""


VERBS: dict[str, Verb] = {
    "plan": plan,
    "replay": replay,
    "compare": compare,
    "explain": explain,
    "diff": diff,
    "predict": predict,
    "accuracy": accuracy,
    "calibrate": calibrate,
    "cache": cache,
    "capacity": capacity,
    "sweep": sweep,
    "workload": workload,
    "convert": convert,
    "doctor": doctor,
    "serve": serve,
    "fleet": fleet,
    "router": router,
    "load": load,
    "agents": agents,
    "tokenizer": tokenizer,
    "events": events,
    "conformance": conformance,
    "demo": demo,
    "qwen3": qwen3,
    "completion": completion,
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top: argparse.ArgumentParser = Parser(
        prog="understudy",
        description="An LLM-serving fleet without its GPUs: engines simulated down to the KV-cache block.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"understudy {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for verb in VERBS.values():
        verb.add_parser(verbs)
    verbs.choices["completion"].set_defaults(top=top)  # its script has the flags of all verbs
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` unless given) and return its exit code."""
    top = build_parser()
    words = sys.argv[1:] if argv is None else argv
    args = top.parse_args(words)
    try:
        code = _run_verb(args)
        sys.stdout.flush()
    except UnderstudyError as error:
        message = replace_settings_by_flags(str(error), words, _list_flags(top, args.verb))
        print(f"understudy {args.verb}: {visible(message)}", file=sys.stderr)
        return EXIT_ERROR
    except MemoryError:
        print(
            f"understudy {args.verb}: this machine has too little memory; use fewer workers, tier blocks or requests",
            file=sys.stderr,
        )
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has exited; redirect stdout so that the flush at exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"understudy {args.verb}: cannot write to standard output: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return code


def _run_verb(args: argparse.Namespace) -> int:
    """Run the verb; convert exceptions raised by user-defined code into a PolicyError."""
    try:
        return VERBS[args.verb].run(args)
    except (Exception, SystemExit) as error:  # a user-defined class may call sys.exit()
        from understudy.user_code import locate_user_failure

        failure = locate_user_failure(error)
        if failure is None or os.environ.get(TRACEBACK):
            raise
        raise PolicyError(f"{failure} ({TRACEBACK}=1 shows the traceback)") from error


def _list_flags(top: argparse.ArgumentParser, verb: str) -> list[str]:
    """List the flags of a verb and of its subcommands."""
    flags: list[str] = []
    pending = [list_verbs(top)[verb]]
    while pending:
        parser = pending.pop()
        flags += [flag for action in parser._actions for flag in action.option_strings]
        pending += list_verbs(parser).values()
    return flags
