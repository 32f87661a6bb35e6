"""The `understudy` command. One module per verb; `main` parses, runs the verb, turns errors into exit codes.

A verb module has `add_parser(verbs)`, which describes its arguments, and `run(args)`, which does the work and
returns the exit code. Help must come at once, so a verb imports what it works with inside `run`.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

from understudy import __version__
from understudy.cli import (
    calibrate,
    compare,
    conformance,
    convert,
    demo,
    events,
    fleet,
    predict,
    qwen3,
    replay,
    router,
    serve,
    tokenizer,
    workload,
)
from understudy.cli.flag_names import by_flag
from understudy.errors import PolicyError, UnderstudyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_ERROR = 2  # bad usage or a typed error; anything else is a defect and shows its traceback
EXIT_INTERRUPTED = 130
TRACEBACK = "UNDERSTUDY_TRACEBACK"
"""In the environment: a router of yours that raises shows where, in full."""

EXAMPLES = """\
examples:
  understudy replay trace.jsonl --workers 4 --html report.html
  understudy compare four.json eight.json
  understudy convert requests.jsonl trace.jsonl --format openai
  understudy serve my-model --port 8000
  understudy conformance vllm tests/golden/vllm
  understudy events verify heard.jsonl --stream raw
  understudy demo                    the block manager at work, in one table
  understudy demo --policy vllm      the same, with vLLM's eviction order
  understudy VERB --help             what a verb does and takes
"""


class Verb(Protocol):
    """What a verb module offers."""

    def add_parser(self, verbs: Verbs, /) -> None:
        """Describe the verb and its arguments."""

    def run(self, args: argparse.Namespace, /) -> int:
        """Do the work; return the exit code. An UnderstudyError becomes its message and exit code 2."""


VERBS: dict[str, Verb] = {
    "replay": replay,
    "compare": compare,
    "predict": predict,
    "calibrate": calibrate,
    "workload": workload,
    "convert": convert,
    "serve": serve,
    "fleet": fleet,
    "router": router,
    "tokenizer": tokenizer,
    "events": events,
    "conformance": conformance,
    "demo": demo,
    "qwen3": qwen3,
}


class _Parser(argparse.ArgumentParser):
    """Of the command line, and of every verb: examples stand as they were written, and a flag in full."""

    def __init__(self, **settings: Any) -> None:
        how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**how | settings)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top: argparse.ArgumentParser = _Parser(
        prog="understudy",
        description="An LLM-serving fleet without its GPUs: engines simulated down to the KV-cache block.",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"understudy {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for verb in VERBS.values():
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` unless given) and return its exit code."""
    top = parser()
    args = top.parse_args(argv)
    try:
        code = _run(args)
        sys.stdout.flush()
    except UnderstudyError as error:
        words = sys.argv[1:] if argv is None else argv
        print(
            f"understudy {args.verb}: {by_flag(str(error), words, _flags(top, args.verb))}", file=sys.stderr
        )
        return EXIT_ERROR
    except MemoryError:
        print(
            f"understudy {args.verb}: the memory of this machine does not suffice; fewer workers, blocks of a tier or "
            "requests need less",
            file=sys.stderr,
        )
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; keep the interpreter from failing once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"understudy {args.verb}: cannot write what is printed: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return code


def _run(args: argparse.Namespace) -> int:
    """Run the verb. What a user's own code raised is no defect of ours: it becomes an UnderstudyError."""
    try:
        return VERBS[args.verb].run(args)
    except Exception as error:
        from understudy.router.load import failure_of_yours

        told = failure_of_yours(error)
        if told is None or os.environ.get(TRACEBACK):
            raise
        raise PolicyError(f"{told} ({TRACEBACK}=1 shows the traceback)") from error


def _flags(top: argparse.ArgumentParser, verb: str) -> list[str]:
    """Those of a verb, and of verbs below it."""
    found: list[str] = []
    left = [_below(top)[verb]]
    while left:
        parser = left.pop()
        found += [flag for action in parser._actions for flag in action.option_strings]
        left += _below(parser).values()
    return found


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(choices[0]) if choices else {}
