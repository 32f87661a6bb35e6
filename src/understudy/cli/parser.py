"""Parser of the command line: errors of one line that suggest the flag that was meant, and a short help."""

from __future__ import annotations

import argparse
import re
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from understudy.context_parallel import CONTEXT_PARALLEL, describe_context_parallel
from understudy.plain_numbers import parse_number, parse_whole_number, refuse_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

EXIT_USAGE = 2
MOST_FLAGS_IN_USAGE = 5
HELP_FLAGS = ("-h", "--help", "--help-all")


class Parser(argparse.ArgumentParser):
    """Parser that keeps the line breaks of examples and rejects abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }
        super().__init__(**defaults | settings)

    def format_help(self) -> str:
        """Return the help: a usage of one line where flags are many, the examples, then the flags."""
        formatter = self._get_formatter()
        formatter.add_usage(
            self.usage or self._shorten_usage(), self._actions, self._mutually_exclusive_groups
        )
        formatter.add_text(self.description)
        formatter.add_text(self.epilog)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()

    def _shorten_usage(self) -> str | None:
        """Return a usage without optional flags, or None if they are few enough to be listed."""
        flags = [action for action in self._actions if action.option_strings]
        if len(flags) <= MOST_FLAGS_IN_USAGE:
            return None
        needed = [
            f"{flag.option_strings[-1]} {flag.metavar or ''}".strip() for flag in flags if flag.required
        ]
        forms = {"+": "{0} [{0} ...]", "*": "[{0} ...]", "?": "[{0}]"}
        names = [
            forms.get(str(self.find_action(name).nargs), "{0}").format(name)
            for name in self.list_positionals()
        ]
        return " ".join(["%(prog)s", *names, *needed, "[flags]"])

    def add_short_help(self, usage: str, examples: str, tasks: Mapping[str, Sequence[str]]) -> None:
        """Let --help show examples and the flags of each task; --help-all shows every flag.

        Call it after the flags in `tasks` were added. `usage` is the command line without "usage:".
        """
        self.usage = usage

        def format_short_help() -> str:
            formatter = self.formatter_class(prog=self.prog)
            formatter.add_usage(usage, [], [])
            formatter.add_text(self.description)
            formatter.add_text(examples)
            for title, flags in {"arguments": self.list_positionals(), **tasks}.items():
                formatter.start_section(title)
                for flag in flags:
                    formatter.add_argument(self.find_action(flag))
                formatter.end_section()
            formatter.add_text(f"{self.prog} --help-all    show every flag")
            return formatter.format_help()

        self.add_argument(
            "--help-all", action=_PrintAll, nargs=0, help="show every flag and exit", dest=argparse.SUPPRESS
        )
        self.format_all_help: Callable[[], str] = self.format_help
        self.format_help = format_short_help  # type: ignore[method-assign]

    def list_positionals(self) -> list[str]:
        """List the names of the positional arguments, as the help shows them."""
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    def find_action(self, name: str) -> argparse.Action:
        """Return the flag or positional argument of that name. StopIteration if there is none."""
        return next(
            action
            for action in self._actions
            if name in action.option_strings or name in (action.metavar, action.dest)
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all of `args`; exit with 2 on an unknown flag, even if arguments are missing too."""
        words = list(sys.argv[1:] if args is None else args)
        if not any(word in HELP_FLAGS for word in words):
            self._reject_unknown_flags(words)
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            word = rest[0]
            self.error(
                self._describe_unknown(word) if word.startswith("-") else f"{word!r}: one argument too many"
            )
        return parsed, rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Parse a value; the error of a number names its unit and what to write."""
        if action.type not in (int, float):
            return super()._get_value(action, arg_string)
        is_whole = action.type is int
        try:
            return parse_whole_number(arg_string) if is_whole else parse_number(arg_string)
        except ValueError:
            unit = action.metavar if isinstance(action.metavar, str) else None
            refused = refuse_number(arg_string, whole=is_whole, unit=unit)
            raise argparse.ArgumentError(action, f"\0{refused}") from None

    def error(self, message: str) -> NoReturn:
        """Print one line, `PROG: flag: problem; remedy`, and exit with 2."""
        text = _rewrite(message)
        remedy = "" if "; " in text else f"; see `{self.prog} --help`"
        self.exit(EXIT_USAGE, f"{self.prog}: {text}{remedy}\n")

    def _reject_unknown_flags(self, words: Sequence[str]) -> None:
        has_verbs = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        for word in words:
            if word == "--" or (has_verbs and not word.startswith("-")):
                return  # positional arguments or the flags of a subcommand follow
            if word.startswith("--") and " " not in word and _name(word) not in self._option_string_actions:
                self.error(self._describe_unknown(word))

    def _describe_unknown(self, word: str) -> str:
        if _name(word).removeprefix("--").replace("-", "_") in CONTEXT_PARALLEL:
            return describe_context_parallel(_name(word))
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return (
            f"{_name(word)} is not a flag{suggest(_name(word), (f for a in shown for f in a.option_strings))}"
        )


class _PrintAll(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,  # noqa: ARG002
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_all_help())
        parser.exit(0)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` for the known name that is most similar to `word`, or nothing."""
    near = get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _name(word: str) -> str:
    return word.partition("=")[0]


def _rewrite(message: str) -> str:
    """Write a message of argparse as `flag: problem; remedy`."""
    if found := re.fullmatch(
        r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message, re.DOTALL
    ):
        name, value, listed = found.groups()
        choices = [choice.strip(" '") for choice in listed.split(",")]
        return f"{name}: {value!r} is not known{suggest(value, choices) or f'; choose {_join(choices)}'}"
    if found := re.fullmatch(r"argument (\S+): \0(.*)", message, re.DOTALL):
        return f"{found[1]} {found[2]}"
    if found := re.fullmatch(r"argument (\S+): expected (?:one|at least one) argument", message):
        return f"{found[1]} needs a value"
    if found := re.fullmatch(r"argument (\S+): ignored explicit argument (.*)", message, re.DOTALL):
        return f"{found[1]} takes no value, got {found[2]}; leave it out"
    if found := re.fullmatch(r"argument (\S+): not allowed with argument (\S+)", message):
        return f"{found[1]} contradicts {found[2]}; give one"
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{found[1]}: missing"
    return message.removeprefix("argument ")


def _join(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
