"""`understudy tokenizer export DIR`: write the built-in tokenizer for clients that count tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from understudy.cli.verbs import Verbs

EXAMPLES = """\
examples:
  understudy tokenizer export tok                     a Hugging Face directory
  understudy tokenizer export hf --hub                a hub cache; then
  HF_HOME=hf HF_HUB_OFFLINE=1 aiperf profile --tokenizer understudy/tok ...
"""


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy tokenizer`."""
    verb = verbs.add_parser(
        "tokenizer",
        help="export the built-in tokenizer for load generators",
        description="Write the built-in tokenizer in Hugging Face's form, so that clients work offline with it.",
        epilog=EXAMPLES,
    )
    verb.add_argument("action", choices=["export"], help="action to run")
    verb.add_argument("directory", type=Path, metavar="DIR", help="output folder; created if missing")
    verb.add_argument("--hub", action="store_true", help="use the layout of a hub cache (an HF_HOME)")


def run(args: argparse.Namespace) -> int:
    """Write the tokenizer and print how to use it."""
    from understudy.errors import InvalidArgument
    from understudy.server.tokenizer.export import export_tokenizer

    try:
        where = export_tokenizer(args.directory, hub=args.hub)
    except OSError as error:
        raise InvalidArgument(f"cannot write the tokenizer: {error}") from error
    print(f"written: {where}")
    if args.hub:
        print(f"use it as understudy/tok with: export HF_HOME={args.directory} HF_HUB_OFFLINE=1")
    return 0
