"""Flags for logs of one's own: which keys they use, which rows and which hours are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.cli import trace_flags

if TYPE_CHECKING:
    import argparse

    from understudy.workload import Workload

_OPTIONS = ("columns", "time", "where")


def add_log_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that name keys and rows of a log."""
    verb.add_argument(
        "--columns",
        metavar="ROLE=NAME,…",
        help="columns of a table: time=request_time,input=prompt_tokens,output=completion_tokens (default: by their "
        "usual names)",
    )
    verb.add_argument("--time", metavar="KEY", help="key of the time of a request (openai)")
    verb.add_argument(
        "--where",
        nargs="+",
        action="extend",
        metavar="KEY=VALUE",
        help="keep rows whose keys have these values, such as status=200 model!=test (tables, openai)",
    )


def add_window_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags that cut a time window out of a log."""
    for flag, effect in (
        ("--from", "leave out sessions that begin earlier after the first request, such as 8h"),
        ("--until", "leave out sessions that begin this long after the first request or later, such as 10h"),
        ("--busiest", "keep the window of this length with the most tokens, such as 1h"),
    ):
        verb.add_argument(flag, dest=flag.strip("-") + "_window", metavar="TIME", help=effect)


def reader_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the reader options that were given; the reader rejects unknown ones."""
    own = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    return {**trace_flags.reader_options(args), **own}


def cut(args: argparse.Namespace, workload: Workload) -> Workload:
    """Return the window that was asked for. ConfigError if it is asked for twice, or is no time."""
    from understudy.cli.windows import read_window
    from understudy.errors import ConfigError
    from understudy.workload.window import cut_busiest, cut_window

    begin, end = read_window(args.from_window, "--from"), read_window(args.until_window, "--until")
    busiest = read_window(args.busiest_window, "--busiest")
    if busiest is not None and (begin is not None or end is not None):
        raise ConfigError("--busiest: contradicts --from and --until, which name the window; give one")
    if busiest is not None:
        return cut_busiest(workload, busiest)
    if begin is None and end is None:
        return workload
    return cut_window(workload, begin or 0.0, end)


def describe_format(args: argparse.Namespace) -> str:
    """Return the format that was guessed, as the start of a line; empty if it was given or nothing shows one."""
    from understudy.workload.guess import guess_format

    found = None if args.format is not None else guess_format(trace_flags.path_read(args))
    return "" if found is None else f"format {found} (guessed): "
