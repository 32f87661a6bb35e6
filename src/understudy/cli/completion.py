"""`understudy completion SHELL`: print a script that completes verbs and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.cli.verbs import list_verbs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from understudy.cli.verbs import Verbs
    from understudy.server.flags import Flag

EXAMPLES = """\
examples:
  source <(understudy completion bash)                                          in ~/.bashrc
  understudy completion zsh > ~/.zfunc/_understudy                              ~/.zfunc is in $fpath
  understudy completion fish > ~/.config/fish/completions/understudy.fish
"""
SHELLS = ("bash", "zsh", "fish")


def add_parser(verbs: Verbs) -> None:
    """Describe `understudy completion`."""
    verb = verbs.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Print a script that completes verbs and flags in a shell.",
        epilog=EXAMPLES,
    )
    verb.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from understudy.cli.fleet import list_fleet_flags
    from understudy.server.flags.ours import all_flags

    top: argparse.ArgumentParser = args.top
    verbs = list_verbs(top)
    served = list({flag.name: flag for flag in all_flags().values()}.values())
    _add_flags(verbs["serve"], served)
    more = list_fleet_flags()
    _add_flags(verbs["fleet"], [*more, *(flag for flag in served if flag.name not in {m.name for m in more})])
    print(shtab.complete(top, args.shell))
    return 0


def _add_flags(verb: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add flags that the verb parses by itself, so that the script contains them."""
    for flag in flags:
        names = [name for name in flag.names if name not in ("-h", "--help")]
        if not names:
            continue
        if flag.kind == "bool":
            verb.add_argument(*names, action="store_true")
        else:
            verb.add_argument(*names, choices=flag.choices)
