"""Define the interface of a verb, and find the parsers of verbs and subcommands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


class Verb(Protocol):
    """Interface of a verb module."""

    def add_parser(self, verbs: Verbs, /) -> None:
        """Add the verb and its arguments to the command line."""

    def run(self, args: argparse.Namespace, /) -> int:
        """Run the verb and return the exit code; `main` prints an UnderstudyError and exits with 2."""


def list_verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the verbs, or of the subcommands of a verb, by name."""
    choices = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(choices[0]) if choices else {}
